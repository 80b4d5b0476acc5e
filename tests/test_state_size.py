"""bench/state_size.py prints the sizes of the article."""

import pytest
import torch

from sympow.attention.embedding import symmetric_power_dim
from sympow.attention.power import power_attention
from sympow.bench.state_size import format_bytes, main, power_state_size


def printed_rows(capsys, *argv):
    main(list(argv))
    return [line.split() for line in capsys.readouterr().out.splitlines()]


@pytest.mark.parametrize(
    "row",
    [
        "2 77 MB 39 MB",
        "4 314 GB 14 GB",
        "6 1.3 PB 2.2 TB",
        "8 5.3 EB 199 TB",
    ],
)
def test_prints_the_row_of_the_article(capsys, row):
    assert row.split() in printed_rows(capsys)


def test_smaller_heads_give_the_smaller_states_of_the_design():
    assert format_bytes(2 * power_state_size(12, 24, 32, symmetric_power_dim(32, 4))) == "995 MB"
    assert format_bytes(2 * power_state_size(12, 48, 16, symmetric_power_dim(16, 4))) == "76 MB"


def test_state_size_is_that_of_the_state_attention_returns():
    q = torch.randn(1, 3, 1, 8)
    _, state = power_attention(q, q, q, p=4, return_state=True)
    assert state.S.numel() + state.z.numel() == power_state_size(1, 1, 8, symmetric_power_dim(8, 4))


def test_fewer_key_value_heads_shrink_the_state_and_more_bytes_grow_it(capsys):
    assert ["2", "153", "MB", "78", "MB"] in printed_rows(capsys, "--bytes=4", "--p=2")
    assert ["2", "26", "MB", "13", "MB"] in printed_rows(capsys, "--n_kv_head=4", "--p=2")


@pytest.mark.parametrize(
    "size, text",
    [(0, "0 B"), (999, "999 B"), (1000, "1.0 KB"), (9.96e3, "10 KB"), (999.6e3, "1.0 MB"), (2e30, "2000000 YB")],
)
def test_format_bytes_never_prints_a_thousand_of_a_unit_that_has_a_larger_one(size, text):
    assert format_bytes(size) == text


@pytest.mark.parametrize(
    "flag", ["--p=3", "--p=10", "--p=4,x", "--p=", "--n_kv_head=5", "--head_dim=0", "--n_layer=many", "--size=1"]
)
def test_refuses_impossible_shapes_in_one_line(capsys, flag):
    with pytest.raises(SystemExit) as stop:
        main([flag])
    assert stop.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1
