"""Context parallel: ranks that share the tokens of a sequence have the results of one rank.

The group tests run in forked processes, gloo, in float64: one group of four ranks takes all cases.
"""

import json
import os
import shutil
from itertools import product
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from helpers import (
    LLAMA,
    SMALL,
    assert_near_run,
    assert_same_run,
    join,
    metrics,
    start_ranks,
    train_traced,
)
from numerics import gradients, relative_error

from sympow import train
from sympow.attention import ATTENTIONS, Sympow
from sympow.attention.parallel import pieces_of
from sympow.attention.parallel.context import Context
from sympow.data.dataset import Dataset
from sympow.data.loader import Windows, eval_batches, train_batch
from sympow.layers.convolution import Convolution
from sympow.layers.mixing import convolve_in_context
from sympow.model import GPT, GPTConfig
from sympow.training.parallel import Layout, split_context, whole_sequences

T, RESET = 32, 7
CASES = {  # name: the model's settings
    "gated": dict(attention="sympow_gating", form="chunked", chunk_size=4),
    "packed": dict(attention="sympow_gating,sympow", form="chunked", chunk_size=4, reset_token=RESET),
    "conformal": dict(attention="conformal_sympow", form="chunked", chunk_size=4, reset_token=RESET, n_kv_head=4),
    "p=4 in chunks": dict(attention="sympow_gating", form="chunked", chunk_size=4, p=4, head_dim=4),
    "hybrid": dict(attention="softmax,conformal_sympow", form="chunked", chunk_size=4),
    "hybrid, packed": dict(attention="softmax,sympow_gating", form="chunked", chunk_size=4, reset_token=RESET),
    "even_power": dict(attention="even_power", p=4, convolution=9),  # on four ranks it reaches over a whole piece
    "pairs, packed": dict(attention="sympow_gating", form="quadratic", p=4, reset_token=RESET, output_gate=True),
    "p=6": dict(attention="conformal_sympow", form="quadratic", p=6, activation_checkpointing=True),
    "Llama": dict(attention="softmax,sympow_gating", convolution=3, **LLAMA),
    "mixture": dict(attention="adaptive_power", adaptive="mixture", form="chunked", chunk_size=4, head_dim=4),
}


# of four ranks, pieces begin at multiples of 8 tokens, or of 4 if they are balanced
CONVOLVED = 2, 3, 4, 5, 6, 12, 40  # tokens of convolutions: within a piece, as long as one, over several and over all
RESETS = {"none": None, "at a border": [8, 16], "before": [7, 15], "after": [9, 17], "many": [0, 3, 4, 5, 12, 20, 31]}
ON_FOUR = "packed", "conformal", "hybrid, packed", "even_power", "pairs, packed"  # the others on two ranks alone


def make_model(**settings):
    torch.manual_seed(0)
    shape = dict(vocab_size=64, n_layer=2, n_head=4, n_kv_head=2, n_embd=32, head_dim=8, gate_bias=1.0, rope_base=99.0)
    model = GPT(GPTConfig(**{**shape, **settings})).double()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model


def make_batch():
    torch.manual_seed(1)
    ids = torch.randint(8, 64, (2, T + 1))
    ids[torch.rand(ids.shape) < 0.1] = RESET
    targets = ids[:, 1:].clone()
    targets[1, 20:] = -1  # as in the rows behind the last one of an evaluation
    return ids[:, :-1], targets


def group_member():
    """Compare each case's loss and gradients with the whole sequence's; write the errors."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, results = dist.get_rank(), {}
    pairs = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    for i, (name, settings) in enumerate(CASES.items()):
        if i % 2 == rank // 2:  # two cases at a time, each on two ranks
            results[f"{name}, 2 ranks"] = errors_of_case(2, pairs[rank // 2], make_model(**settings))
    for name in ON_FOUR:
        results[f"{name}, 4 ranks"] = errors_of_case(4, dist.group.WORLD, make_model(**CASES[name]))
    for balanced, resets in product((False, True), RESETS):
        context = Context(dist.group.WORLD, balanced)
        results[f"{balanced}, {resets}"] = [errors_of_convolution(context, n, RESETS[resets]) for n in CONVOLVED]
    with open(f"errors_{rank}.json", "w") as f:
        json.dump({name: errors for name, errors in results.items() if errors}, f)
    dist.barrier()
    dist.destroy_process_group()


def errors_of_case(size, group, model):
    """Return the relative errors of the loss and each gradient; None on other ranks than the group's first."""
    layout = Layout(SimpleNamespace(rank=dist.get_rank(group), world=size), size)
    layout.mesh = SimpleNamespace(get_group=lambda dimension: group)
    layout.balanced = split_context(model, layout, T, torch.float64, compiled=False)
    ids, targets = (torch.cat([x[:, a:b] for a, b in layout.spans(T)], dim=1) for x in make_batch())
    _, loss = model(ids, targets)
    count = (targets != -1).sum()
    total = count.clone()
    dist.all_reduce(total, group=group)
    loss = loss * count / total  # a part of the global mean, though ranks have different numbers of targets
    loss.backward()
    sums = [loss.detach(), *(p.grad for p in model.parameters())]
    for x in sums:
        dist.all_reduce(x, group=group)
    if dist.get_rank(group):
        return None
    model.zero_grad(set_to_none=True)
    with whole_sequences(model):
        _, expected = model(*make_batch())
        expected.backward()  # which runs the blocks again with activation checkpointing
    assert all(block.attn.mix.context for block in model.transformer.h)
    references = [expected.detach(), *(p.grad for p in model.parameters())]
    assert all(x.norm() > 1e-6 for x in references)
    return [relative_error(x, r, 0) for x, r in zip(sums, references)]


def errors_of_convolution(context, n, tokens):
    """Return the largest relative error, on any rank, of a convolution of n tokens with resets at `tokens`: of y and
    the gradients."""
    torch.manual_seed(n)
    conv = Convolution([2, 1, 1], 3, n).double()
    x, dy = torch.randn(2, 2, T, 4, 3, dtype=torch.float64)
    resets = None
    if tokens is not None:
        resets = torch.zeros(2, T, dtype=torch.bool)
        resets[0, tokens] = True  # the other sequence has none
    size = T // (context.size * context.pieces)
    mine = torch.cat([torch.arange(piece * size, (piece + 1) * size) for piece in context.mine])
    leaf, sequence = x[:, mine].requires_grad_(), x.clone().requires_grad_()
    y = torch.cat(convolve_in_context(conv, leaf, None if resets is None else resets[:, mine], context), dim=2)
    dx, dweight = torch.autograd.grad(y, (leaf, conv.weight), dy[:, mine])
    dist.all_reduce(dweight, group=context.group)
    expected = torch.cat(conv(sequence, resets), dim=2)
    expected_dx, expected_dweight = torch.autograd.grad(expected, (sequence, conv.weight), dy)
    pairs = (y, expected[:, mine]), (dx, expected_dx[:, mine]), (dweight, expected_dweight)
    largest = torch.tensor(max(relative_error(x, reference, 0) for x, reference in pairs))
    dist.all_reduce(largest, dist.ReduceOp.MAX, context.group)  # the first and the last piece lack a neighbour
    return largest.item()


@pytest.fixture(scope="module")
def errors(tmp_path_factory):
    folder = tmp_path_factory.mktemp("group")
    codes = join(*start_ranks(4, group_member, cwd=str(folder)))
    assert codes == [0] * 4, (folder / "rank_0").read_text()[-3000:]
    return {name: x for i in range(4) for name, x in json.loads((folder / f"errors_{i}.json").read_text()).items()}


@pytest.mark.parametrize("name,size", [*((name, 2) for name in CASES), *((name, 4) for name in ON_FOUR)])
def test_ranks_that_share_sequences_have_the_loss_and_every_gradient_of_one_rank(errors, name, size):
    assert max(errors[f"{name}, {size} ranks"]) < 1e-10


@pytest.mark.parametrize("balanced", [False, True])
@pytest.mark.parametrize("resets", RESETS)
def test_a_convolution_reaches_over_the_borders_of_pieces_as_on_one_rank(errors, balanced, resets):
    assert max(errors[f"{balanced}, {resets}"]) < 1e-12


def spans_of(rank, size, balanced, block_size):
    """Return the spans of tokens of a sequence that a rank of one group has."""
    layout = Layout(SimpleNamespace(rank=rank, world=size), size)
    layout.balanced = balanced
    return layout.spans(block_size)


@pytest.mark.parametrize("balanced", [False, True])
def test_slices_of_all_ranks_are_the_sequence_and_are_read_alone(dataset, balanced):
    windows = Windows(Dataset(dataset), "train", 64, pack=True)
    batches = lambda *spans: [
        windows.batch([3, 5, 7], *spans),
        train_batch(windows, 1, 0, 0, 1, 4, *spans),
        *eval_batches(windows, 512, 4, 0, 1, *spans),
    ]
    starts = []
    for rank in range(4):
        spans = spans_of(rank, 4, balanced, 64)
        assert [start * (8 if balanced else 4) // 64 for start, _ in spans] == list(pieces_of(rank, 4, balanced))
        starts += [start for start, _ in spans]
        for batch, mine in zip(batches(), batches(spans), strict=True):
            for x, y in zip(batch, mine, strict=True):
                assert torch.equal(torch.cat([x[:, a:b] for a, b in spans], dim=1), y)
    assert sorted(starts) == [*range(0, 64, 8 if balanced else 16)]


@pytest.mark.parametrize(
    "settings,message",
    [
        ("--context_parallel=3", "number of ranks must be a multiple of context_parallel=3, got 2"),
        ("--block_size=30 --tokens_per_step=120", "a context must be a multiple of 2 x context_parallel = 4 tokens"),
        ("--attention=heinsen", "attention=heinsen cannot be spread over context_parallel=2 ranks"),
        ("--attention=sympow,heinsen", "attention=heinsen cannot be spread over context_parallel=2 ranks"),
        ("--attention=own", "attention=own cannot be spread over context_parallel=2 ranks: its class does not set"),
        ("--attention=adaptive_power", "adaptive=continuous computes each row from all keys at once"),
        ("--attention=sympow --form=recurrent", "form=recurrent cannot be spread over ranks"),
        ("--context_parallel=0", "context_parallel must be at least 1, got 0"),
    ],
)
def test_what_cannot_be_spread_over_ranks_is_refused(go, tmp_path, monkeypatch, refused, settings, message):
    monkeypatch.setitem(ATTENTIONS, "own", type("Own", (Sympow,), {}))
    for name, value in dict(RANK=0, WORLD_SIZE=2, LOCAL_RANK=0).items():
        monkeypatch.setenv(name, str(value))
    assert message in refused(go, "--context_parallel=2", *settings.split()) and os.listdir(tmp_path) == []


def train_in(folder, dataset, ranks, *settings, main=train.main):
    folder.mkdir(exist_ok=True)
    argv = [*SMALL, f"--dataset={dataset}", "--out_dir=out", "--n_kv_head=1", f"--context_parallel={ranks}", *settings]
    ran = start_ranks(ranks, main, *argv, cwd=str(folder))
    codes = join(*ran)
    assert codes == [0] * ranks, "".join((folder / f"rank_{i}").read_text()[-2000:] for i in range(ranks))


ROUNDING = dict(abs=1e-5, rel=0)
HYBRID = "--attention=softmax,conformal_sympow --form=chunked --pack=1 --convolution=4 --output_gate=True".split()


def test_two_ranks_that_share_sequences_train_as_one_and_go_on_as_one(go, dataset, tmp_path):
    assert go(*HYBRID, "--n_kv_head=1", "--out_dir=one") == 0
    train_in(tmp_path / "two", dataset, 2, *HYBRID, "--max_iters=3")
    assert "2 x 1 ranks x 4 sequences x 32 context x 2 acc" in (tmp_path / "two" / "rank_0").read_text()
    assert go(*HYBRID, "--n_kv_head=1", "--out_dir=two/out") == 0  # from its checkpoint, alone
    assert_near_run("two/out", "one", **ROUNDING)
    assert len(metrics("one", "val_loss")) > 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "ranks,settings",
    [
        (2, "--context_parallel=2"),
        (3, "--then=64@0.5"),
        (4, ""),
        (3, "--shard=True"),
        (4, "--context_parallel=2"),
        (4, "--context_parallel=2 --shard=True"),
    ],
)
def test_a_resumed_run_has_the_same_bits_on_any_number_of_ranks(dataset, tmp_path, ranks, settings):
    argv = *HYBRID, "--context_parallel=1", *settings.split(), f"--tokens_per_step={256 * ranks}"
    train_in(tmp_path / "whole", dataset, ranks, *argv)
    shutil.copytree(tmp_path / "whole", tmp_path / "cut")
    shutil.rmtree(tmp_path / "cut/out/ckpt/step_00000006")
    train_in(tmp_path / "cut", dataset, ranks, *argv)
    assert_same_run(tmp_path / "cut/out", tmp_path / "whole/out")


@pytest.mark.slow
def test_ranks_that_share_sequences_train_compiled(dataset, tmp_path):
    settings = *HYBRID, "--max_iters=3", "--activation_checkpointing=True"
    train_in(tmp_path / "eager", dataset, 2, *settings)
    train_in(tmp_path / "compiled", dataset, 2, *settings, "--compile=True", main=train_traced)
    assert_near_run(tmp_path / "compiled/out", tmp_path / "eager/out", **ROUNDING)


@pytest.mark.slow
def test_two_groups_of_a_sharded_model_train_as_one_rank(go, dataset, tmp_path):
    assert go(*HYBRID, "--n_kv_head=1", "--out_dir=one") == 0
    for shard in (False, True):
        train_in(tmp_path / f"{shard}", dataset, 4, *HYBRID, "--context_parallel=2", f"--shard={shard}")
        assert_near_run(f"{shard}/out", "one", **ROUNDING)


def test_pieces_on_the_kernels_are_the_whole_sequence_and_no_sum_is_computed_twice(monkeypatch):
    """In the interpreter, and one process: piece by piece forward, and from the last one backward."""
    pytest.importorskip("triton", reason="Triton has no wheel for this system")
    from sympow.kernels.chunked import passes as chunked
    from sympow.kernels import operators, registry

    n, options = 256, dict(p=2, chunk=128)
    q, k, v, dy = torch.randn(4, 1, 2 * n, 1, 16)
    log_g = torch.nn.functional.logsigmoid(torch.randn(1, 2 * n, 1) + 2)
    log_g[:, n + 50] = -torch.inf
    tensors = [q, k, v, log_g]
    expected = gradients(lambda *x: operators.chunked_attention(*x, **options)[0], tensors, dy)
    updates, update = [], chunked.update_state
    monkeypatch.setattr(chunked, "update_state", lambda *args: updates.append(1) or update(*args))
    scan, outputs = Scan(), []
    leaves = [[x.clone().requires_grad_() for x in part] for part in zip(*(x.split(n, 1) for x in tensors))]
    for part in leaves:
        gate = part[3].detach().sum(1).exp()
        outputs.append(operators.chunked_attention_of_piece(*part, gate, registry.register(scan), **options))
    scan.state = None
    for part, y, d in reversed([*zip(leaves, outputs, dy.split(n, 1))]):
        y.backward(d)
    assert len(updates) == 4
    for x, *pieces in zip(expected, *([y, *(leaf.grad for leaf in part)] for y, part in zip(outputs, leaves))):
        assert (torch.cat(pieces, dim=1) - x).norm() <= 1e-5 * x.norm()


@pytest.mark.slow  # the compiler; the test above has the same piece without it
def test_a_piece_on_the_kernels_is_compiled_whole_and_computed_again():
    """With activation checkpointing, which runs a block without the compiler if its graph breaks."""
    pytest.importorskip("triton", reason="Triton has no wheel for this system")
    from sympow.kernels import operators, registry

    tensors = [*torch.randn(3, 1, 256, 1, 16), torch.full((1, 256, 1), -0.1)]
    alone, gate, options = Alone(), tensors[3].sum(1).exp(), dict(p=2, chunk=128)
    state = gate, registry.register(alone)
    of_piece = lambda q, *x: operators.chunked_attention_of_piece(2 * q, *x, *state, **options)
    twice = lambda *x: torch.utils.checkpoint.checkpoint(of_piece, *x, use_reentrant=False)
    sequence = lambda q, *x: operators.chunked_attention(2 * q, *x, **options)[0]
    dy = torch.randn(1, 256, 1, 16)
    expected = gradients(sequence, tensors, dy)
    for function in (twice, torch.compile(twice, fullgraph=True, backend="aot_eager")):
        alone.calls = []
        results = gradients(function, tensors, dy)
        assert alone.calls == [False, False, True]
        assert all((a - b).norm() <= 1e-5 * b.norm() for a, b in zip(results, expected))


class Alone:
    """The exchange of states of a sequence that has one piece."""

    def scan_states(self, S, z, gate, reverse):
        self.calls.append(reverse)
        return lambda: (torch.zeros_like(S), torch.zeros_like(z))


class Scan:
    """The exchange of states between pieces that come one after the other."""

    state = None

    def scan_states(self, S, z, gate, reverse):
        S0, z0 = self.state or (torch.zeros_like(S), torch.zeros_like(z))
        self.state = gate[..., None, None] * S0 + S, gate[..., None] * z0 + z
        return lambda: (S0, z0)
