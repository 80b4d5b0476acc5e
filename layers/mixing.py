"""Run the parts of a layer that mix tokens: its convolution, the norms of its heads, its attention and the gate on the
output."""

from dataclasses import replace

import torch


def projected_heads(config):
    """Return how many heads c_attn computes for q, for k, for v and, if there is one, for the output's gate."""
    return [config.n_head, config.n_kv_head, config.n_kv_head] + [config.n_head] * config.output_gate


def mix_tokens(layer, x, heads, resets, state):
    """Run layer.conv, layer.mix and layer.output_gate, and return (y [B, T, H, D], the state after these tokens).

    layer.mix is a Variant, conv a Convolution or None, output_gate an OutputGate or None, q_norm and k_norm are
    HeadNorms or None. heads: q, k and v together, [B, T, H + 2 Hkv, D], and behind them H heads more with an output
    gate, as layer.heads counts them. x, resets, state: as for Variant.forward.
    """
    q, k, v, *gate = split_heads(layer, heads, resets, state)
    y, new_state = layer.mix(x, normalize_heads(layer, q, k, v), resets, state)
    if layer.conv is not None and state is not None:
        inputs = layer.conv.last_inputs(heads, resets, state.conv_inputs)
        new_state = replace(new_state, conv_inputs=inputs)
    return layer.output_gate(y, *gate) if gate else y, new_state


def split_heads(layer, heads, resets, state=None):
    """Return q, k and v, convolved if the layer does that, and the gate if there is one. Arguments: as above."""
    if layer.conv is None:
        return heads.split(layer.heads, dim=2)
    if state is None and layer.mix.context is not None:
        return convolve_in_context(layer.conv, heads, resets, layer.mix.context)
    return layer.conv(heads, resets, state and state.conv_inputs)


def convolve_in_context(conv, heads, resets, context):
    """Return conv(heads, resets) of this rank's tokens of sequences that the ranks of a Context share."""
    n = len(conv.weight) - 1
    if resets is not None:
        resets = context.split_overlapping(resets.to(torch.int32), n).bool()
    return [context.join(x[:, n:]) for x in conv(context.split_overlapping(heads, n), resets)]


def normalize_heads(layer, q, k, v):
    """Return (q, k, v), the heads of q and of k normalised if the layer does that."""
    if layer.q_norm is None:
        return q, k, v
    return layer.q_norm(q).to(q.dtype), layer.k_norm(k).to(k.dtype), v
