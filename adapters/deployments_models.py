"""What a checkpoint has and how engines cut it: models as lists of parameters with a rule each.

The numbers are those of a model's ``config.json``; tensor names and shapes are the ones its checkpoint has, one tensor
per expert. A *rule* says how tensor and expert parallelism cut a parameter; ``deployments_layouts`` applies it.

>>> model = model_of({"model_type": "qwen3", "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2,
...                   "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 2, "vocab_size": 10})
>>> space = model.space()
>>> len(space), space.total_elements
(25, 1360)
>>> [parameter.name for parameter in model.layers[0].parameters][:3]
['self_attn.qkv_proj', 'self_attn.o_proj', 'self_attn.q_norm']
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum

from layout_algebra.space import CheckpointSpace, TensorSpec


class DeploymentError(ValueError):
    """A description of a deployment that contradicts itself or cannot be read; names the place in its file."""


class Rule(Enum):
    """How parallelism cuts a parameter."""

    WHOLE = "whole on every rank"
    COLUMN = "axis 0 over tensor parallel ranks"
    ROW = "axis 1 over tensor parallel ranks"
    VOCABULARY = "axis 0 over tensor parallel ranks, padded until it divides"
    QKV = "query, key and value in one parameter, by heads over tensor parallel ranks"
    GATE_UP = "gate and up in one parameter, each by axis 0 over tensor parallel ranks"
    EXPERT_GATE_UP = "a stack of the rank's experts, gate and up in one parameter"
    EXPERT_DOWN = "a stack of the rank's experts"


@dataclass(frozen=True, slots=True)
class Tensor:
    """One checkpoint tensor; ``{e}`` in its name stands for the number of an expert."""

    name: str
    shape: tuple[int, ...]
    dtype: str = "BF16"


@dataclass(frozen=True, slots=True)
class Parameter:
    """One engine parameter: its checkpoint tensors and the rule that cuts it."""

    name: str
    rule: Rule
    tensors: tuple[Tensor, ...]


@dataclass(frozen=True, slots=True)
class Layer:
    """Parameters of one layer; names are relative to it. Layers of one kind are equal."""

    parameters: tuple[Parameter, ...]


@dataclass(frozen=True, slots=True)
class Model:
    """A model as its checkpoint has it.

    Attributes
    ----------
    first, last
        Parameters of the first and of the last pipeline stage besides layers.
    layers
        One per layer; tensor names follow ``model.layers.<number>.``.
    heads, kv_heads, experts
        For rules that cut by them; no experts in a dense model.
    """

    first: tuple[Parameter, ...]
    layers: tuple[Layer, ...]
    last: tuple[Parameter, ...]
    heads: int
    kv_heads: int
    experts: int

    def tensor_names(self, tensor: Tensor, prefix: str) -> list[str]:
        """The checkpoint's names of one tensor, one per expert where there are experts."""
        if "{e}" not in tensor.name:
            return [prefix + tensor.name]
        return [prefix + tensor.name.replace("{e}", str(expert)) for expert in range(self.experts)]

    def space(self) -> CheckpointSpace:
        """The checkpoint."""
        groups = [("", self.first), ("", self.last)]
        groups += [(layer_prefix(number), layer.parameters) for number, layer in enumerate(self.layers)]
        return CheckpointSpace(
            TensorSpec(name, tensor.shape, tensor.dtype)
            for prefix, parameters in groups
            for parameter in parameters
            for tensor in parameter.tensors
            for name in self.tensor_names(tensor, prefix)
        )


def layer_prefix(number: int) -> str:
    """What the tensor names of one layer begin with."""
    return f"model.layers.{number}."


def model_of(config: Mapping[str, object]) -> Model:
    """A model from the numbers of its ``config.json``.

    Raises
    ------
    DeploymentError
        If the ``model_type`` is none of the known ones or a number is missing or no positive integer.
    """
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in _FAMILIES:
        raise DeploymentError(f"model_type: {kind!r}; expected one of {', '.join(sorted(_FAMILIES))}")
    return _FAMILIES[kind](_Numbers(config))


class _Numbers:
    """Reads the numbers of a config and says which one is wrong."""

    def __init__(self, config: Mapping[str, object]) -> None:
        self._config = config

    def __getitem__(self, key: str) -> int:
        value = self._config.get(key)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            what = "is missing" if value is None else f"{value!r}"
            raise DeploymentError(f"{key}: {what}; expected a whole number above zero")
        return value

    def get(self, key: str, default: int) -> int:
        """A number that may be left out, null or 0."""
        return default if self._config.get(key) is None else (self[key] if self._config[key] != 0 else 0)

    def flag(self, key: str) -> bool:
        """A boolean that may be left out."""
        return self._config.get(key) is True

    def texts(self, key: str) -> list[str]:
        """A list of words that may be left out."""
        value = self._config.get(key)
        return [str(word) for word in value] if isinstance(value, list) else []


def _one(rule: Rule, name: str, *shape: int, dtype: str = "BF16") -> Parameter:
    return Parameter(name, rule, (Tensor(f"{name}.weight", shape, dtype),))


def _ends(numbers: _Numbers) -> tuple[tuple[Parameter, ...], tuple[Parameter, ...]]:
    hidden, words = numbers["hidden_size"], numbers["vocab_size"]
    first = (_one(Rule.VOCABULARY, "model.embed_tokens", words, hidden),)
    norm = _one(Rule.WHOLE, "model.norm", hidden)
    tied = numbers.flag("tie_word_embeddings")
    return first, (norm,) if tied else (norm, _one(Rule.VOCABULARY, "lm_head", words, hidden))


def _norms(hidden: int) -> tuple[Parameter, ...]:
    return tuple(_one(Rule.WHOLE, name, hidden) for name in ("input_layernorm", "post_attention_layernorm"))


def _mlp(place: str, hidden: int, inner: int) -> tuple[Parameter, ...]:
    gate, up = (Tensor(f"{place}.{name}_proj.weight", (inner, hidden)) for name in ("gate", "up"))
    down = _one(Rule.ROW, f"{place}.down_proj", hidden, inner)
    return Parameter(f"{place}.gate_up_proj", Rule.GATE_UP, (gate, up)), down


def _experts(hidden: int, inner: int) -> tuple[Parameter, ...]:
    gate, up = (Tensor(f"mlp.experts.{{e}}.{name}_proj.weight", (inner, hidden)) for name in ("gate", "up"))
    down = Tensor("mlp.experts.{e}.down_proj.weight", (hidden, inner))
    return (
        Parameter("mlp.experts.w13", Rule.EXPERT_GATE_UP, (gate, up)),
        Parameter("mlp.experts.w2", Rule.EXPERT_DOWN, (down,)),
    )


def _grouped_attention(numbers: _Numbers) -> tuple[Parameter, ...]:
    hidden, heads, kv_heads = (numbers[f] for f in ("hidden_size", "num_attention_heads", "num_key_value_heads"))
    size = numbers.get("head_dim", hidden // heads)
    sizes = (("q", heads), ("k", kv_heads), ("v", kv_heads))
    tensors = tuple(Tensor(f"self_attn.{name}_proj.weight", (count * size, hidden)) for name, count in sizes)
    return (
        Parameter("self_attn.qkv_proj", Rule.QKV, tensors),
        _one(Rule.ROW, "self_attn.o_proj", hidden, heads * size),
        _one(Rule.WHOLE, "self_attn.q_norm", size),
        _one(Rule.WHOLE, "self_attn.k_norm", size),
    )


def _qwen3(numbers: _Numbers) -> Model:
    hidden = numbers["hidden_size"]
    first, last = _ends(numbers)
    parts = (*_grouped_attention(numbers), *_norms(hidden), *_mlp("mlp", hidden, numbers["intermediate_size"]))
    layers = (Layer(parts),) * numbers["num_hidden_layers"]
    return Model(first, layers, last, numbers["num_attention_heads"], numbers["num_key_value_heads"], 0)


def _qwen3_moe(numbers: _Numbers) -> Model:
    hidden, experts = numbers["hidden_size"], numbers["num_experts"]
    first, last = _ends(numbers)
    router = _one(Rule.WHOLE, "mlp.gate", experts, hidden)
    inner = numbers["moe_intermediate_size"]
    parts = (*_grouped_attention(numbers), *_norms(hidden), router, *_experts(hidden, inner))
    layers = (Layer(parts),) * numbers["num_hidden_layers"]
    return Model(first, layers, last, numbers["num_attention_heads"], numbers["num_key_value_heads"], experts)


def _latent_attention(numbers: _Numbers) -> tuple[Parameter, ...]:
    hidden, heads, rank = numbers["hidden_size"], numbers["num_attention_heads"], numbers["kv_lora_rank"]
    rope, plain, value = (numbers[f] for f in ("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"))
    query, low = heads * (rope + plain), numbers.get("q_lora_rank", 0)
    queries: tuple[Parameter, ...]
    if low:
        queries = (
            _one(Rule.WHOLE, "self_attn.q_a_proj", low, hidden),
            _one(Rule.WHOLE, "self_attn.q_a_layernorm", low),
            _one(Rule.COLUMN, "self_attn.q_b_proj", query, low),
        )
    else:
        queries = (_one(Rule.COLUMN, "self_attn.q_proj", query, hidden),)
    return (
        *queries,
        _one(Rule.WHOLE, "self_attn.kv_a_proj_with_mqa", rank + rope, hidden),
        _one(Rule.WHOLE, "self_attn.kv_a_layernorm", rank),
        _one(Rule.COLUMN, "self_attn.kv_b_proj", heads * (plain + value), rank),
        _one(Rule.ROW, "self_attn.o_proj", hidden, heads * value),
    )


def _indexer(numbers: _Numbers) -> tuple[Parameter, ...]:
    """The part of sparse attention that picks tokens; whole on every rank."""
    heads, size, hidden = numbers["index_n_heads"], numbers["index_head_dim"], numbers["hidden_size"]
    norm = tuple(Tensor(f"self_attn.indexer.k_norm.{part}", (size,)) for part in ("weight", "bias"))
    return (
        _one(Rule.WHOLE, "self_attn.indexer.wq_b", heads * size, numbers["q_lora_rank"]),
        _one(Rule.WHOLE, "self_attn.indexer.wk", size, hidden),
        *(Parameter(tensor.name, Rule.WHOLE, (tensor,)) for tensor in norm),
        _one(Rule.WHOLE, "self_attn.indexer.weights_proj", heads, hidden),
    )


def _latent_moe(numbers: _Numbers, *, indexed: bool) -> Model:
    hidden, experts, inner = (numbers[f] for f in ("hidden_size", "n_routed_experts", "moe_intermediate_size"))
    first, last = _ends(numbers)
    attention = (*_latent_attention(numbers), *_norms(hidden))
    bias = Tensor("mlp.gate.e_score_correction_bias", (experts,), "F32")
    shared = numbers.get("n_shared_experts", 0)
    dense = _mlp("mlp", hidden, numbers["intermediate_size"])
    sparse = (
        _one(Rule.WHOLE, "mlp.gate", experts, hidden),
        Parameter("mlp.gate.bias", Rule.WHOLE, (bias,)),
        *(_mlp("mlp.shared_experts", hidden, shared * inner) if shared else ()),
        *_experts(hidden, inner),
    )
    indexers = numbers.texts("indexer_types") if indexed else []
    layers = []
    for number in range(numbers["num_hidden_layers"]):
        own = indexed and (number >= len(indexers) or indexers[number] == "full")
        mlp = dense if number < numbers.get("first_k_dense_replace", 0) else sparse
        layers.append(Layer((*attention, *(_indexer(numbers) if own else ()), *mlp)))
    heads = numbers["num_attention_heads"]
    return Model(first, tuple(layers), last, heads, heads, experts)


_FAMILIES: Mapping[str, Callable[[_Numbers], Model]] = {
    "qwen3": _qwen3,
    "qwen3_moe": _qwen3_moe,
    "deepseek_v3": lambda numbers: _latent_moe(numbers, indexed=False),
    "kimi_k2": lambda numbers: _latent_moe(numbers, indexed=False),
    "glm_moe_dsa": lambda numbers: _latent_moe(numbers, indexed=True),
}
