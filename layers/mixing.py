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
    gate. x, resets, state: as for Variant.forward.
    """
    qkv, gate = split_heads(layer, heads)
    inputs = None
    if layer.conv is not None:
        recent = state and state.conv_inputs
        inputs = state and layer.conv.last_inputs(qkv, resets, recent)
        context = layer.mix.context if state is None else None
        qkv = convolve_in_context(layer.conv, qkv, resets, context) if context else layer.conv(qkv, resets, recent)
    y, state = layer.mix(x, normalize_heads(layer, qkv), resets, state)
    if inputs is not None:
        state = replace(state, conv_inputs=inputs)
    return y if gate is None else layer.output_gate(y, gate), state


def convolve_in_context(conv, qkv, resets, context):
    """Return conv(qkv, resets) of this rank's tokens of sequences that the ranks of a Context share."""
    n = len(conv.weight) - 1
    if resets is not None:
        resets = context.split_overlapping(resets.to(torch.int32), n).bool()
    return context.join(conv(context.split_overlapping(qkv, n), resets)[:, n:])


def normalize_heads(layer, qkv):
    """Return qkv with the heads of q and of k normalised, if the layer does that."""
    if layer.q_norm is None:
        return qkv
    q, k, v = layer.mix.split(qkv)
    return torch.cat((layer.q_norm(q), layer.k_norm(k), v), dim=2).to(qkv.dtype)


def split_heads(layer, heads):
    """Return (q, k and v together, the gate or None), views of `heads`."""
    if layer.output_gate is None:
        return heads, None
    return heads.tensor_split((-layer.mix.config.n_head,), dim=2)
