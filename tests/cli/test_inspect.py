"""`transload inspect` and `transload diff` as a user runs them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from typer.testing import CliRunner, Result

from adapters.cli.layout_rules import LayoutRuleError, Rule, rules_of_options, rules_of_toml
from adapters.cli.main import app
from layout_algebra.blocks import declare, whole
from layout_algebra.runs import RunTable
from layout_algebra.shardings import fused_qkv, gate_up, padded_vocab
from layout_algebra.slice_copy import CopyTable
from layout_algebra.source_map import ParameterMap, SourceMap
from layout_algebra.space import CheckpointSpace, TensorSpec

LAYOUT = """
degree = 4

[[rule]]
tensors = ["*.q_proj.weight", "*.k_proj.weight", "*.v_proj.weight"]
parameter = "*.qkv_proj.weight"
cut = "fused_qkv"
heads = 8
kv_heads = 2

[[rule]]
tensors = "*.o_proj.weight"
cut = "row"

[[rule]]
tensors = ["*.experts.#.gate_proj.weight", "*.experts.#.up_proj.weight"]
parameter = "*.experts.w13_weight"
cut = "gate_up"

[[rule]]
tensors = "*.experts.#.down_proj.weight"
parameter = "*.experts.w2_weight"
cut = "whole"

[[rule]]
tensors = "*norm.weight"
cut = "whole"

[[rule]]
tensors = "model.embed_tokens.weight"
cut = "padded_vocab"
padded_rows = 128
"""


def shapes() -> dict[str, tuple[int, ...]]:
    out: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (100, 16)}
    for layer in range(3):
        prefix = f"model.layers.{layer}"
        out[f"{prefix}.input_layernorm.weight"] = (16,)
        for name, shape in (("q", (64, 16)), ("k", (16, 16)), ("v", (16, 16)), ("o", (16, 64))):
            out[f"{prefix}.self_attn.{name}_proj.weight"] = shape
        for expert in range(8):
            for name, shape in (("gate", (8, 16)), ("up", (8, 16)), ("down", (16, 8))):
                out[f"{prefix}.mlp.experts.{expert}.{name}_proj.weight"] = shape
    return out


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    save_file({name: np.zeros(shape, np.float16) for name, shape in shapes().items()}, folder / "model.safetensors")
    return folder


@pytest.fixture
def layout(tmp_path: Path) -> Path:
    path = tmp_path / "layout.toml"
    path.write_text(LAYOUT)
    return path


def space() -> CheckpointSpace:
    return CheckpointSpace(TensorSpec(name, shape, "F16") for name, shape in shapes().items())


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(each) for each in arguments])


def shown(*arguments: object) -> dict[str, object]:
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.output
    found: dict[str, object] = json.loads(result.stdout)
    return found


def save(path: Path, source_map: SourceMap) -> Path:
    path.write_bytes(source_map.to_bytes())
    return path


def test_a_checkpoint_is_shown_by_kinds_of_tensors(checkpoint: Path) -> None:
    report = shown("inspect", checkpoint)["checkpoint"]
    assert (report["tensors"], report["elements"], report["bytes"]) == (88, 18_544, 37_088)
    assert report["dtypes"] == {"F16": 37_088}
    rows = {row["name"]: row for row in report["rows"]}
    assert rows["model.layers.{0..2}.mlp.experts.{0..7}.up_proj.weight"] == {
        "name": "model.layers.{0..2}.mlp.experts.{0..7}.up_proj.weight",
        "tensors": 24,
        "shape": [8, 16],
        "dtype": "F16",
        "bytes": 24 * 256,
    }
    assert len(shown("inspect", checkpoint, "--all")["checkpoint"]["rows"]) == 88
    text = run("inspect", checkpoint).stdout
    assert "88 tensors, 18,544 elements, 36.2 KiB" in text
    assert "model.layers.{0..2}.self_attn.q_proj.weight" in text


def test_a_declared_layout_is_shown_with_coverage_both_ways_and_formulas(checkpoint: Path, layout: Path) -> None:
    report = shown("inspect", checkpoint, "--layout", layout, "--rank", 3)
    (rank,) = report["maps"]
    assert rank["name"] == "rank 3 of 4"
    assert (rank["copied"], rank["empty"], rank["opaque"]) == (4_720, 448, 0)
    assert (rank["held"], rank["duplicated"]) == (4_720, 0)
    assert rank["held_share"] == pytest.approx(4_720 / 18_544)
    assert "model.layers.{0..2}.mlp.experts.{0..5}.down_proj.weight" in rank["unused"]
    rows = {row["name"]: row for row in rank["rows"]}
    assert rows["model.embed_tokens.weight"]["empty"] == 448
    assert rows["model.layers.{0..2}.mlp.experts.w13_weight"]["shape"] == [2, 16, 16]
    assert report["missing"] == []
    assert "model.layers.{0..2}.self_attn.k_proj.weight[0:8, :] on ranks 0, 1" in report["repeated"]
    assert report["formulas"]["model.layers.{0..2}.self_attn.qkv_proj.weight"].splitlines() == [
        "model.layers.0.self_attn.qkv_proj.weight[0:16, :] = "
        "model.layers.0.self_attn.q_proj.weight[16*r : 16*(r+1), :]",
        "model.layers.0.self_attn.qkv_proj.weight[16:24, :] = "
        "model.layers.0.self_attn.k_proj.weight[8*floor(r/2) : 8*floor(r/2)+8, :]",
        "model.layers.0.self_attn.qkv_proj.weight[24:32, :] = "
        "model.layers.0.self_attn.v_proj.weight[8*floor(r/2) : 8*floor(r/2)+8, :]",
    ]
    text = run("inspect", checkpoint, "--layout", layout, "--rank", 3).stdout
    for line in (
        "4,720 copied (91.33%), 448 empty, 0 opaque",
        "4,720 of 18,544 elements (25.45%)",
        "formulas (r is a rank of 4)",
        "w13_weight[e, 0:8, :] = model.layers.0.mlp.experts.{2*r+e}.gate_proj.weight[:, :] for e in 0:2",
    ):
        assert line in text
    assert "formulas" not in run("inspect", checkpoint, "--layout", layout, "--no-formulas").stdout
    only = shown("inspect", checkpoint, "--layout", layout, "--parameter", "*.o_proj.*", "--all")
    assert [row["name"] for row in only["maps"][0]["rows"]] == [
        f"model.layers.{layer}.self_attn.o_proj.weight" for layer in range(3)
    ]
    assert list(only["formulas"]) == [row["name"] for row in only["maps"][0]["rows"]]


def test_the_declared_layout_is_the_one_that_shardings_make(checkpoint: Path, layout: Path) -> None:
    here = space()
    rules = rules_of_toml(layout)
    for rank in range(4):
        made = rules.declare(here, rank)
        prefix = "model.layers.1"
        q, k, v = (whole(here, f"{prefix}.self_attn.{name}_proj.weight") for name in "qkv")
        halves = [
            gate_up(
                *(whole(here, f"{prefix}.mlp.experts.{e}.{n}_proj.weight") for n in ("gate", "up")), rank=0, degree=1
            )
            for e in (2 * rank, 2 * rank + 1)
        ]
        wanted = {
            f"{prefix}.self_attn.qkv_proj.weight": fused_qkv(q, k, v, rank=rank, degree=4, heads=8, kv_heads=2).ids(),
            f"{prefix}.mlp.experts.w13_weight": np.stack([half.ids() for half in halves]),
            "model.embed_tokens.weight": padded_vocab(
                whole(here, "model.embed_tokens.weight"), rank=rank, degree=4, padded_rows=128
            ).ids(),
        }
        for name, ids in wanted.items():
            assert np.array_equal(made.ids(name), ids), name
    report = shown("inspect", checkpoint, "--layout", layout, "--rank", 2)
    assert report["maps"][0]["digest"] == rules.declare(here, 2).digest()


def test_every_cut_can_be_written(tmp_path: Path) -> None:
    here = CheckpointSpace(
        [TensorSpec(f"l.{layer}.{name}", shape, "BF16") for layer in range(2)
         for name, shape in (("w", (8, 4)), ("g", (8, 4)), ("u", (8, 4)), ("q", (8, 4)), ("k", (4, 4)), ("v", (4, 4)))]
    )  # fmt: skip
    path = tmp_path / "all.toml"
    path.write_text(
        """
degree = 2
[[rule]]
tensors = ["*.q", "*.k", "*.v"]
parameter = "*.qkv"
cut = "grouped_qkv"
heads = 4
kv_heads = 2
[[rule]]
tensors = ["*.g", "*.u"]
parameter = "*.gu"
cut = "gate_up"
order = "interleaved"
transpose = true
dtype = "F32"
[[rule]]
tensors = "l.0.w"
cut = "rows_in_blocks"
blocks = 2
[[rule]]
tensors = "l.#.w"
parameter = "w"
cut = "column"
experts = "cut"
"""
    )
    made = rules_of_toml(path).declare(here, 1)
    assert made.parameters == ("l.0.gu", "l.0.qkv", "l.0.w", "l.1.gu", "l.1.qkv", "w")
    assert (made.shape("l.0.gu"), made.dtype("l.0.gu"), made.shape("w")) == ((4, 8), "F32", (1, 4, 4))
    flat = rules_of_options(["l.*=flat"], 2).declare(here, 0)
    assert flat.shape("flat") == ((4 * 32 + 2 * 16) * 2 // 2,)
    uneven = rules_of_options(["*.w=fsdp2", "*=whole"], 3).declare(here, 2)
    assert uneven.shape("l.1.w") == (2, 4)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "rule"),
        ("rule = []", r"no \[\[rule\]\]"),
        ("[[rule]]\ntensors = 'a'\ncut = 'sideways'", "sideways"),
        ("[[rule]]\ntensors = 'a'\ncut = 'row'\nhead = 3", "head"),
        ("[[rule]]\ntensors = 'a'\ncut = 'gate_up'", "takes 2 tensors, got 1"),
        ("[[rule]]\ntensors = ['*.a', 'b']\ncut = 'gate_up'", "differ in how many"),
        ("[[rule]]\ntensors = '#.#'\ncut = 'row'", "more than one #"),
        ("[[rule]]\ntensors = 'a'\ncut = 'row'\nparameter = '*'", "has more"),
        ("[[rule]", "line 1"),
    ],
)
def test_layout_files_that_mean_nothing_are_refused_by_name(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "bad.toml"
    path.write_text(text)
    with pytest.raises(LayoutRuleError, match=words) as caught:
        rules_of_toml(path)
    assert str(path) in str(caught.value)


def test_rules_that_do_not_fit_the_checkpoint_are_refused_by_name() -> None:
    here = space()
    for options, words in (
        (["*.nothing=row"], r"rule 1 \(\*\.nothing\): no tensor"),
        (["*norm.weight=row"], r"rule 1 .*: model.layers.0.input_layernorm.weight: .*axis 1"),
        (["*.q_proj.weight=fsdp2", "*.q_proj.weight=row"], "rule 2 .*no tensor"),
        (["*.o_proj.weight=column"], "no part 0 of 3 equal parts"),
        (["*.experts.#.up_proj.weight=whole"], "needs a parameter name"),
    ):
        with pytest.raises(LayoutRuleError, match=words):
            rules_of_options(options, 3).declare(here, 0)
    with pytest.raises(LayoutRuleError, match="expected PATTERN=CUT"):
        rules_of_options(["*.w"], 1)
    with pytest.raises(LayoutRuleError, match="rank 3 of 3"):
        rules_of_options(["*=whole"], 3).declare(here, 3)
    lonely = CheckpointSpace(
        [TensorSpec("a.g", (2,), "BF16"), TensorSpec("b.g", (2,), "BF16"), TensorSpec("b.u", (2,), "BF16")]
    )
    pairs = rules_of_options(["x=whole"], 1)
    pairs = type(pairs)((Rule(["*.g", "*.u"], "gate_up", "*.gu"),), 1)
    with pytest.raises(LayoutRuleError, match=r"a\.g has no partner that matches \*\.u"):
        pairs.declare(lonely, 0)


def test_saved_maps_are_ranks_in_their_order(tmp_path: Path, layout: Path) -> None:
    rules = rules_of_toml(layout)
    paths = [save(tmp_path / f"engine-0-{rank}.map", rules.declare(space(), rank)) for rank in range(4)]
    report = shown("inspect", *paths)
    assert [each["name"] for each in report["maps"]] == [str(path) for path in paths]
    assert report["missing"] == []
    assert "[16*r : 16*(r+1), :]" in report["formulas"]["model.layers.{0..2}.self_attn.qkv_proj.weight"]
    assert report["note"] == "r is a rank of 4"
    first_two = shown("inspect", *paths[:2])
    assert "model.layers.{0..2}.mlp.experts.{4..7}.up_proj.weight[:, :]" in first_two["missing"]
    one = shown("inspect", paths[1])
    assert one["formulas"]["model.layers.{0..2}.self_attn.o_proj.weight"] == (
        "model.layers.0.self_attn.o_proj.weight[:, :] = model.layers.0.self_attn.o_proj.weight[:, 16:32]"
    )


def test_opaque_empty_and_tied_parameters_are_shown(tmp_path: Path) -> None:
    here = CheckpointSpace(
        [TensorSpec("w", (4, 2), "BF16"), TensorSpec("a.0", (2,), "F32"), TensorSpec("a.1", (2,), "F32")]
    )
    w = whole(here, "w")
    made = declare(here, {"p": w, "tied": w.take(0, 1, 3)})
    opaque = ParameterMap((3,), "F32", CopyTable.empty(), RunTable.from_ids([0, 1, 2]), ("a.0", "a.1"))
    cache = ParameterMap((7,), "BF16", CopyTable.empty(), RunTable.empty())
    path = save(
        tmp_path / "x.map", SourceMap(here, {"p": made["p"], "tied": made["tied"], "A": opaque, "cache": cache})
    )
    (report,) = shown("inspect", path)["maps"]
    assert report["opaque_parameters"] == ["A"]
    assert report["empty_parameters"] == ["cache"]
    assert (report["copied"], report["empty"], report["opaque"], report["held"]) == (12, 7, 3, 8)
    assert report["duplicated"] == 4
    assert report["duplicates"] == [{"range": "w[1:3, :]", "held_by": ["p", "tied"]}]
    assert {row["name"]: row["depends_on"] for row in report["rows"]}["A"] == ["a.{0..1}"]
    text = run("inspect", path).stdout
    for line in (
        "held by several elements",
        "w[1:3, :]",
        "p, tied",
        "A is computed from a.0, a.1",
        "cache[0:7] is empty",
    ):
        assert line in text


def test_irregular_maps_are_shown_without_formulas(tmp_path: Path) -> None:
    here = CheckpointSpace([TensorSpec("w", (64,), "BF16")])
    rng = np.random.default_rng(5)
    paths = [save(tmp_path / f"{k}.map", SourceMap.from_ids(here, {"p": rng.permutation(64) + 1})) for k in range(2)]
    report = shown("inspect", *paths)
    assert "of the first rank alone" in report["note"]
    assert len(report["repeated"]) == 1
    assert report["repeated"][0].startswith("w[")


def test_diff_says_what_each_says_and_exits_with_one(tmp_path: Path) -> None:
    here = space()
    embed = whole(here, "model.embed_tokens.weight")
    left = save(tmp_path / "left.map", declare(here, {"e": embed, "same": embed.take(0, 0, 2)}))
    right = save(
        tmp_path / "right.map", declare(here, {"e": embed.take(0, 0, 60).pad(0, 100), "same": embed.take(0, 0, 2)})
    )
    result = run("diff", left, right)
    assert result.exit_code == 1
    for word in ("1 difference", "e", "[60:100, :]", "model.embed_tokens.weight[60:100, :]", "empty"):
        assert word in result.stdout
    result = run("diff", left, right, "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout) == {
        "left": str(left),
        "right": str(right),
        "same": False,
        "differences": [
            {
                "parameter": "e",
                "kind": "ids",
                "where": "[60:100, :]",
                "left": "model.embed_tokens.weight[60:100, :]",
                "right": "empty",
            }
        ],
    }
    result = run("diff", left, left)
    assert result.exit_code == 0
    assert "say the same" in result.stdout


def test_names_are_shown_as_they_are(tmp_path: Path) -> None:
    """Not as markup, emoji, or an error of the encoding."""
    here = space()
    embed = whole(here, "model.embed_tokens.weight")
    folder = tmp_path / "[" / "x]"
    folder.mkdir(parents=True)
    odd = save(folder / "a.map", declare(here, {"[bold]e": embed}))
    ids = np.arange(*here.id_range("model.embed_tokens.weight")).reshape(embed.shape)
    turned = save(tmp_path / "[bold].map", SourceMap.from_ids(here, {"[bold]e": ids[:, ::-1]}))
    table = run("diff", odd, turned).stdout
    assert "[/x]" in "".join(table.split())
    assert "[bold].map" in table
    assert ":-1" in table
    raw = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff.map"))
    raw.write_bytes(odd.read_bytes())
    assert json.loads(run("diff", "--json", odd, raw).stdout)["right"].endswith("\\udcff.map")
    assert "\\udcff.map" in run("inspect", "--json", raw).stdout


def test_bad_input_is_one_line_without_a_traceback(tmp_path: Path, checkpoint: Path, layout: Path) -> None:
    garbage = tmp_path / "garbage.map"
    garbage.write_bytes(b"TLMAP\x00\x00\x01" + b"\x00" * 40)
    good = save(tmp_path / "good.map", declare(space(), {}))
    other = save(tmp_path / "other.map", declare(CheckpointSpace([TensorSpec("a", (1,), "BF16")]), {}))
    empty = tmp_path / "empty"
    empty.mkdir()
    for arguments, words in (
        (("inspect", tmp_path / "nothing"), "No such file"),
        (("inspect", garbage), "not a source map of this version"),
        (("inspect", empty), "no *.safetensors file"),
        (("inspect", good, other), "different checkpoints"),
        (("inspect", checkpoint, good), "is a folder"),
        (("inspect", good, "--layout", layout), "is no folder"),
        (("inspect", checkpoint, "--layout", layout, "--cut", "a=row"), "not both"),
        (("inspect", checkpoint, "--layout", tmp_path / "none.toml"), "none.toml"),
        (("inspect", checkpoint, "--layout", layout, "--rank", 4), "rank 4 of 4"),
        (("inspect", checkpoint, "--cut", "nothing=row"), "no tensor"),
        (("diff", garbage, good), "garbage.map: not a source map"),
        (("diff", good, tmp_path / "nothing.map"), "No such file"),
    ):
        result = run(*arguments)
        assert result.exit_code == 2, (arguments, result.output)
        assert words in result.stderr
        assert "Traceback" not in result.output
        assert len(result.stderr.strip().splitlines()) == 1


def test_inspect_needs_no_torch(checkpoint: Path, layout: Path) -> None:
    script = textwrap.dedent(
        """
        import sys
        for name in ("torch", "transformers", "zmq"):
            sys.modules[name] = None
        from typer.testing import CliRunner
        from adapters.cli.main import app
        result = CliRunner().invoke(app, sys.argv[1:])
        print(result.output)
        raise SystemExit(result.exit_code)
        """
    )
    done = subprocess.run(
        [sys.executable, "-c", script, "inspect", str(checkpoint), "--layout", str(layout)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd=Path(__file__).resolve().parents[2],
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "formulas (r is a rank of 4)" in done.stdout
