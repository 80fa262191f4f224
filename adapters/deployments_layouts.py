"""Source maps of standard layouts, declared: Megatron and FSDP trainers, tensor- and expert-parallel engines.

Layers of one kind differ only in where their ids begin, and ranks that cut a parameter alike hold the same of it. So
every distinct part is declared once, at the first layer that has it, and moved to the others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from adapters.deployments_models import DeploymentError, Layer, Model, Parameter, Rule, layer_prefix
from layout_algebra.blocks import Layout, declare, stack, whole
from layout_algebra.errors import MapError
from layout_algebra.shardings import fused_qkv, gate_up, grouped_qkv, padded_vocab
from layout_algebra.slice_copy import CopyTable
from layout_algebra.source_map import ParameterMap, SourceMap
from layout_algebra.space import CheckpointSpace


@dataclass(frozen=True, slots=True)
class Megatron:
    """Trainers: ranks of a pipeline stage are numbered by tensor, then context, then data parallel place.

    ``tp``, ``pp``, ``cp`` and ``dp`` multiply to the GPUs; ``ep * etp`` ranks of a stage hold all experts once.
    """

    tp: int = 1
    pp: int = 1
    cp: int = 1
    dp: int = 1
    ep: int = 1
    etp: int = 1


@dataclass(frozen=True, slots=True)
class Fsdp:
    """Trainers: axis 0 of every parameter in ``shards`` chunks, experts stacked; ``dp`` replicas of that."""

    shards: int
    dp: int = 1


@dataclass(frozen=True, slots=True)
class Rollout:
    """Engines alike: ``tp``, ``dp`` (of attention) and ``pp`` multiply to an engine's GPUs; ``ep`` divides a stage."""

    engines: int
    tp: int = 1
    dp: int = 1
    pp: int = 1
    ep: int = 1


Maps = dict[str, SourceMap]


def trainer_maps(model: Model, space: CheckpointSpace, layout: Megatron | Fsdp) -> Maps:
    """``trainer/<rank>`` -> map; replicas share one object.

    Raises
    ------
    DeploymentError
        If heads, experts or sizes do not divide as the layout asks.
    """
    declarer = _Declarer(model, space)
    if isinstance(layout, Fsdp):
        shards = [declarer.source_map(range(len(model.layers)), _Shard(rank, layout.shards), ends="both")
                  for rank in range(layout.shards)]  # fmt: skip
        return {f"trainer/{rank}": shards[rank % layout.shards] for rank in range(layout.shards * layout.dp)}
    stage = layout.tp * layout.cp * layout.dp
    known: dict[tuple[int, _Cut], SourceMap] = {}
    out = {}
    for rank in range(stage * layout.pp):
        pipe, inside = divmod(rank, stage)
        expert = inside % (layout.ep * layout.etp)
        cut = _Cut(
            inside % layout.tp, layout.tp, expert // layout.etp, layout.ep, expert % layout.etp, layout.etp, True
        )
        if (pipe, cut) not in known:
            known[pipe, cut] = declarer.stage_map(pipe, layout.pp, cut)
        out[f"trainer/{rank}"] = known[pipe, cut]
    return out


def rollout_maps(model: Model, space: CheckpointSpace, layout: Rollout) -> Maps:
    """``engine/<engine>/<rank>`` -> map; equal ranks share one object.

    Raises
    ------
    DeploymentError
        If heads, experts or sizes do not divide as the layout asks.
    """
    declarer = _Declarer(model, space)
    stage = layout.tp * layout.dp
    etp = stage // layout.ep
    ranks = []
    for rank in range(stage * layout.pp):
        pipe, inside = divmod(rank, stage)
        cut = _Cut(inside % layout.tp, layout.tp, inside // etp, layout.ep, inside % etp, etp, False)
        ranks.append(declarer.stage_map(pipe, layout.pp, cut))
    return {f"engine/{engine}/{rank}": ranks[rank] for engine in range(layout.engines) for rank in range(len(ranks))}


def pipeline_layers(layers: int, stage: int, stages: int) -> range:
    """Layers of one pipeline stage: in order, near-equal, the longer stages first."""
    each, more = divmod(layers, stages)
    first = stage * each + min(stage, more)
    return range(first, first + each + (stage < more))


@dataclass(frozen=True, slots=True)
class _Cut:
    """A rank's place: tensor, expert and expert-tensor parallel, and whether query, key and value are grouped."""

    tp: int
    tp_size: int
    ep: int
    ep_size: int
    etp: int
    etp_size: int
    grouped: bool


@dataclass(frozen=True, slots=True)
class _Shard:
    """A rank's place in fully sharded data parallel."""

    rank: int
    size: int


class _Declarer:
    """Declares parameters once per kind of layer and cut."""

    def __init__(self, model: Model, space: CheckpointSpace) -> None:
        self._model, self._space = model, space
        self._declared: dict[tuple[object, ...], tuple[int, dict[str, ParameterMap]]] = {}
        self._moved: dict[tuple[object, ...], dict[str, ParameterMap]] = {}
        self._kinds: dict[Layer, int] = {}
        kinds: dict[int, int] = {}
        for layer in model.layers:
            if id(layer) not in kinds:
                kinds[id(layer)] = self._kinds.setdefault(layer, len(self._kinds))
        self._kind_of = [kinds[id(layer)] for layer in model.layers]
        self._base = [
            min(
                space.id_range(name)[0]
                for parameter in layer.parameters
                for tensor in parameter.tensors
                for name in model.tensor_names(tensor, layer_prefix(number))[:1]
            )
            for number, layer in enumerate(model.layers)
        ]

    def stage_map(self, stage: int, stages: int, cut: _Cut) -> SourceMap:
        """The map of a rank of one pipeline stage."""
        ends = {(True, True): "both", (True, False): "first", (False, True): "last"}
        layers = pipeline_layers(len(self._model.layers), stage, stages)
        return self.source_map(layers, cut, ends=ends.get((stage == 0, stage == stages - 1), "none"))

    def source_map(self, layers: range, cut: _Cut | _Shard, *, ends: str) -> SourceMap:
        """The map of a rank that has these layers."""
        parameters: dict[str, ParameterMap] = {}
        for end, group in (("first", self._model.first), ("last", self._model.last)):
            if ends in (end, "both"):
                for parameter in group:
                    parameters |= self._declare(parameter, "", cut)
        for number in layers:
            for parameter in self._model.layers[number].parameters:
                parameters |= self._of_layer(number, parameter, cut)
        return SourceMap(self._space, parameters)

    def _of_layer(self, number: int, parameter: Parameter, cut: _Cut | _Shard) -> dict[str, ParameterMap]:
        key = (parameter.name, self._kind_of[number], _relevant(parameter.rule, cut))
        found = self._moved.get((number, *key))
        if found is not None:
            return found
        if key not in self._declared:
            self._declared[key] = (number, self._declare(parameter, layer_prefix(number), cut))
        first, declared = self._declared[key]
        step = self._base[number] - self._base[first]
        moved = {
            layer_prefix(number) + name.removeprefix(layer_prefix(first)): _move(entry, step)
            for name, entry in declared.items()
        }
        self._moved[(number, *key)] = moved
        return moved

    def _declare(self, parameter: Parameter, prefix: str, cut: _Cut | _Shard) -> dict[str, ParameterMap]:
        try:
            layouts = self._layouts(parameter, prefix, cut)
            declared = declare(self._space, layouts)
        except MapError as error:
            raise DeploymentError(f"{prefix}{parameter.name} ({parameter.rule.value}): {error}") from error
        return {name: declared[name] for name in declared.parameters}

    def _layouts(self, parameter: Parameter, prefix: str, cut: _Cut | _Shard) -> Mapping[str, Layout]:
        model, space = self._model, self._space
        name = prefix + parameter.name
        tensors = [model.tensor_names(tensor, prefix) for tensor in parameter.tensors]
        experts = parameter.rule in (Rule.EXPERT_GATE_UP, Rule.EXPERT_DOWN)
        if isinstance(cut, _Shard):
            if not experts:
                return {names[0]: whole(space, names[0]).chunk(0, cut.rank, cut.size) for names in tensors}
            each = -(-model.experts // cut.size)
            mine = range(min(model.experts, cut.rank * each), min(model.experts, (cut.rank + 1) * each))
            return {name: self._stack(parameter.rule, tensors, mine, 0, 1)} if mine else {}
        if experts:
            if model.experts % cut.ep_size:
                raise MapError(f"{model.experts} experts do not divide over {cut.ep_size} ranks")
            each = model.experts // cut.ep_size
            mine = range(cut.ep * each, (cut.ep + 1) * each)
            return {name: self._stack(parameter.rule, tensors, mine, cut.etp, cut.etp_size)}
        parts = [whole(space, names[0]) for names in tensors]
        rank, degree = cut.tp, cut.tp_size
        match parameter.rule:
            case Rule.WHOLE:
                layout = parts[0]
            case Rule.COLUMN:
                layout = parts[0].shard(0, rank, degree)
            case Rule.ROW:
                layout = parts[0].shard(1, rank, degree)
            case Rule.VOCABULARY:
                padded = -(-parts[0].shape[0] // degree) * degree
                layout = padded_vocab(parts[0], rank=rank, degree=degree, padded_rows=padded)
            case Rule.GATE_UP:
                layout = gate_up(*parts, rank=rank, degree=degree)
            case _:
                fuse = grouped_qkv if cut.grouped else fused_qkv
                layout = fuse(*parts, rank=rank, degree=degree, heads=model.heads, kv_heads=model.kv_heads)
        return {name: layout}

    def _stack(self, rule: Rule, tensors: list[list[str]], mine: range, rank: int, degree: int) -> Layout:
        if rule is Rule.EXPERT_DOWN:
            return stack([whole(self._space, tensors[0][expert]).shard(1, rank, degree) for expert in mine])
        gates, ups = tensors
        return stack(
            [gate_up(whole(self._space, gates[e]), whole(self._space, ups[e]), rank=rank, degree=degree) for e in mine]
        )


def _relevant(rule: Rule, cut: _Cut | _Shard) -> tuple[object, ...]:
    """What of a cut a rule looks at, so that ranks which differ elsewhere share what they hold."""
    if isinstance(cut, _Shard):
        return (cut,)
    if rule is Rule.WHOLE:
        return ()
    if rule in (Rule.EXPERT_GATE_UP, Rule.EXPERT_DOWN):
        return (cut.ep, cut.ep_size, cut.etp, cut.etp_size)
    return (cut.tp, cut.tp_size, cut.grouped)


def _move(entry: ParameterMap, step: int) -> ParameterMap:
    """The same copies with every id ``step`` higher."""
    if not step or not len(entry.copies):
        return entry
    rows = entry.copies.rows.copy()
    rows[:, 1] += step
    return ParameterMap(entry.shape, entry.dtype, CopyTable(rows), entry.opaque)
