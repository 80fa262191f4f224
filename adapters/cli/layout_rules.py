"""A declared layout as a small file: which checkpoint tensors one rank keeps, cut how, under which name.

::

    degree = 8                                        # ranks of the group

    [[rule]]
    tensors = "*.o_proj.weight"
    cut = "row"

    [[rule]]
    tensors = ["*.q_proj.weight", "*.k_proj.weight", "*.v_proj.weight"]
    parameter = "*.qkv_proj.weight"                   # by default the first tensor's name
    cut = "fused_qkv"
    heads = 64
    kv_heads = 8

    [[rule]]
    tensors = ["*.experts.#.gate_proj.weight", "*.experts.#.up_proj.weight"]
    parameter = "*.experts.w13_weight"
    cut = "gate_up"
    experts = "split"                                 # or "cut"

``*`` stands for any text, the same in all tensors of a parameter and in its name, and ``#`` for a number along which
tensors are stacked: with ``experts = "split"`` every rank keeps some of them whole, with ``"cut"`` a part of each. The
first rule that matches a tensor takes it; tensors that no rule matches are not kept.

Cuts: ``whole``, ``column`` (axis 0), ``row`` (axis 1), ``fsdp2`` (axis 0, ceil-sized), ``flat`` (all tensors of the
rule in one flat parameter, each beginning at a multiple of ``align``), ``padded_vocab`` (to ``padded_rows``),
``rows_in_blocks`` (``blocks``), ``gate_up`` (``order``), ``fused_qkv`` and ``grouped_qkv`` (``heads``, ``kv_heads``).
``transpose = true`` turns what comes out, ``dtype`` names the parameter's own.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from layout_algebra.blocks import Layout, concatenate, declare, whole
from layout_algebra.errors import LayoutError
from layout_algebra.shardings import (
    column_parallel,
    expert_stack,
    fsdp1_flat,
    fsdp2,
    fused_qkv,
    gate_up,
    grouped_qkv,
    padded_vocab,
    row_parallel,
    rows_in_blocks,
)
from layout_algebra.source_map import SourceMap
from layout_algebra.space import CheckpointSpace, natural_key

__all__ = ["CUTS", "LayoutRuleError", "LayoutRules", "Rule", "rules_of_options", "rules_of_toml"]

Cut = Literal[
    "whole",
    "column",
    "row",
    "fsdp2",
    "flat",
    "padded_vocab",
    "rows_in_blocks",
    "gate_up",
    "fused_qkv",
    "grouped_qkv",
]

CUTS: tuple[str, ...] = Cut.__args__  # type: ignore[attr-defined]
"""Names of all cuts."""

_PARTS = {"gate_up": 2, "fused_qkv": 3, "grouped_qkv": 3}


class LayoutRuleError(LayoutError):
    """A layout file that says nothing that can be done; the message names the file and the rule."""


class Rule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One kind of parameter."""

    tensors: str | list[str]
    cut: Cut
    parameter: str | None = None
    experts: Literal["split", "cut"] = "split"
    order: str = "gate_up"
    heads: int = 0
    kv_heads: int = 0
    padded_rows: int = 0
    blocks: int = 1
    align: int = 1
    transpose: bool = False
    dtype: str | None = None

    @property
    def patterns(self) -> tuple[str, ...]:
        """The tensors' patterns."""
        return (self.tensors,) if isinstance(self.tensors, str) else tuple(self.tensors)


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    rule: list[Rule]
    degree: int = 1


class LayoutRules(msgspec.Struct, frozen=True):
    """Rules in order, and the size of the group of ranks."""

    rules: tuple[Rule, ...]
    degree: int

    def declare(self, space: CheckpointSpace, rank: int, degree: int | None = None) -> SourceMap:
        """What one rank keeps of a checkpoint.

        Raises
        ------
        LayoutRuleError
            If a rule matches nothing, a tensor has no partner, or a tensor cannot be cut like that.
        """
        of = self.degree if degree is None else degree
        if of < 1 or not 0 <= rank < of:
            raise LayoutRuleError(f"rank {rank} of {of}: expected a rank in 0:{of}")
        layouts: dict[str, Layout] = {}
        dtypes: dict[str, str] = {}
        taken: set[str] = set()
        for number, rule in enumerate(self.rules, start=1):
            where = f"rule {number} ({', '.join(rule.patterns)})"
            found = _matches(space, rule, taken)
            if not found:
                raise LayoutRuleError(f"{where}: no tensor of the checkpoint matches it")
            for name, parts in _parameters(rule, found, where).items():
                if name in layouts:
                    raise LayoutRuleError(f"{where}: makes {name}, which another rule makes already")
                try:
                    layouts[name] = _cut(space, rule, parts, rank, of)
                except LayoutError as error:
                    raise LayoutRuleError(f"{where}: {name}: {error}") from error
                if rule.dtype is not None:
                    dtypes[name] = rule.dtype
                taken.update(tensor for stack in parts for tensor in stack)
        return declare(space, layouts, dtypes)


def rules_of_toml(path: Path) -> LayoutRules:
    """Read a layout file.

    Raises
    ------
    LayoutRuleError
        If it cannot be read or says something unknown; the message names the file and the place in it.
    """
    try:
        return _checked(msgspec.convert(tomllib.loads(path.read_text()), _File))
    except (OSError, ValueError, RecursionError, LayoutRuleError) as error:
        raise LayoutRuleError(f"{path}: {error}") from error


def rules_of_options(options: Sequence[str], degree: int) -> LayoutRules:
    """Rules written ``PATTERN=CUT``, as in ``"*.o_proj.weight=row"``.

    Raises
    ------
    LayoutRuleError
        If an option has no ``=`` or an unknown cut.
    """
    rules = []
    for option in options:
        pattern, _, cut = option.rpartition("=")
        if not pattern or cut not in CUTS:
            raise LayoutRuleError(f"{option!r}: expected PATTERN=CUT with one of {', '.join(CUTS)}")
        rules.append(msgspec.convert({"tensors": pattern, "cut": cut}, Rule))
    return _checked(_File(rules, degree))


def _checked(file: _File) -> LayoutRules:
    if not file.rule:
        raise LayoutRuleError("no [[rule]] in it")
    for number, rule in enumerate(file.rule, start=1):
        patterns = rule.patterns
        needed = _PARTS.get(rule.cut, 1)
        if not patterns or (rule.cut != "flat" and len(patterns) != needed):
            raise LayoutRuleError(f"rule {number}: cut {rule.cut} takes {needed} tensors, got {len(patterns)}")
        if len({(p.count("*"), p.count("#")) for p in patterns}) > 1 and rule.cut != "flat":
            raise LayoutRuleError(f"rule {number}: {', '.join(patterns)} differ in how many * or # they have")
        if any(p.count("#") > 1 for p in patterns):
            raise LayoutRuleError(f"rule {number}: more than one # in a pattern")
        if rule.parameter is not None and ("#" in rule.parameter or rule.parameter.count("*") > patterns[0].count("*")):
            raise LayoutRuleError(f"rule {number}: parameter {rule.parameter!r} has more * than its tensors, or a #")
    return LayoutRules(tuple(file.rule), file.degree)


_Key = tuple[tuple[str, ...], int]
"""What the stars of a pattern matched, and its number."""


def _matches(space: CheckpointSpace, rule: Rule, taken: set[str]) -> list[dict[_Key, str]]:
    """For every pattern the tensors that match it and that no earlier rule took."""
    found: list[dict[_Key, str]] = []
    for pattern in rule.patterns:
        regex = re.compile("".join({"*": "(.*?)", "#": r"(?P<n>\d+)"}.get(part, re.escape(part))
                                   for part in re.split(r"([*#])", pattern)))  # fmt: skip
        number = regex.groupindex.get("n", 0)
        one: dict[_Key, str] = {}
        for name in space.names:
            match = None if name in taken else regex.fullmatch(name)
            if match is not None:
                texts = tuple(text for k, text in enumerate(match.groups(), start=1) if k != number)
                one[texts, int(match["n"]) if number else 0] = name
        found.append(one)
    return found if any(found) else []


def _parameters(rule: Rule, found: list[dict[_Key, str]], where: str) -> dict[str, list[list[str]]]:
    """Parameter name -> for every pattern its tensors, stacked ones in order."""
    if rule.cut == "flat":
        every = sorted({name for one in found for name in one.values()}, key=natural_key)
        return {rule.parameter or "flat": [every]}
    keys = {key for one in found for key in one}
    for key in sorted(keys):
        lacking = [pattern for pattern, one in zip(rule.patterns, found, strict=True) if key not in one]
        if lacking:
            have = next(one[key] for one in found if key in one)
            raise LayoutRuleError(f"{where}: {have} has no partner that matches {lacking[0]}")
    out: dict[str, list[list[str]]] = {}
    for texts in sorted({texts for texts, _ in keys}):
        numbers = sorted(number for other, number in keys if other == texts)
        parts = [[one[texts, number] for number in numbers] for one in found]
        name = parts[0][0] if rule.parameter is None else _filled(rule.parameter, texts)
        if rule.parameter is None and len(numbers) > 1:
            raise LayoutRuleError(f"{where}: stacks {len(numbers)} tensors and needs a parameter name")
        if name in out:
            raise LayoutRuleError(f"{where}: makes {name} twice; put a * into its name for each * of its tensors")
        out[name] = parts
    return out


def _filled(pattern: str, texts: Sequence[str]) -> str:
    parts = pattern.split("*")
    return "".join(part + text for part, text in zip(parts, [*texts, ""], strict=False)) if len(parts) > 1 else pattern


def _cut(space: CheckpointSpace, rule: Rule, parts: list[list[str]], rank: int, degree: int) -> Layout:
    """One parameter of one rank."""
    if rule.cut == "flat":
        layouts = [whole(space, name) for name in parts[0]]
        return fsdp1_flat(layouts, rank=rank, degree=degree, align_elements=max(1, rule.align))
    stacked = any("#" in pattern for pattern in rule.patterns)
    split = stacked and rule.experts == "split"
    at: Mapping[str, int] = {"rank": 0, "degree": 1} if split else {"rank": rank, "degree": degree}
    made = [_one(rule, [whole(space, name) for name in names], at["rank"], at["degree"])
            for names in zip(*parts, strict=True)]  # fmt: skip
    if rule.transpose:
        made = [each.transpose(*range(len(each.shape) - 2), -1, -2) for each in made]
    if not stacked:
        return made[0]
    return expert_stack(made, rank=rank, degree=degree) if split else expert_stack(made)


def _one(rule: Rule, tensors: Sequence[Layout], rank: int, degree: int) -> Layout:
    match rule.cut:
        case "column":
            return column_parallel(tensors[0], rank=rank, degree=degree)
        case "row":
            return row_parallel(tensors[0], rank=rank, degree=degree)
        case "fsdp2":
            return fsdp2(tensors[0], rank=rank, degree=degree)
        case "padded_vocab":
            rows = max(rule.padded_rows, tensors[0].shape[0])
            return padded_vocab(tensors[0], rank=rank, degree=degree, padded_rows=rows)
        case "rows_in_blocks":
            return rows_in_blocks(tensors[0], rank=rank, degree=degree, blocks=rule.blocks)
        case "gate_up":
            return gate_up(tensors[0], tensors[1], rank=rank, degree=degree, order=rule.order)
        case "fused_qkv":
            return fused_qkv(*tensors, rank=rank, degree=degree, heads=rule.heads, kv_heads=rule.kv_heads)
        case "grouped_qkv":
            return grouped_qkv(*tensors, rank=rank, degree=degree, heads=rule.heads, kv_heads=rule.kv_heads)
        case _:
            return concatenate(tensors) if len(tensors) > 1 else tensors[0]
