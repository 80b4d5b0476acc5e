"""The chunked form of power attention: pairs inside a chunk, and a state that carries what came before."""
