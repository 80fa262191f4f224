"""A whole mixture-of-experts worker, the one that the benchmark measures, in small."""

from __future__ import annotations

from adapters.probing import probe
from tests.benchmarks.probe import HIDDEN, INNER, moe_load, moe_parameters, moe_space
from tests.fakes import keeps_bits


def test_every_element_of_a_worker_is_found_in_a_few_copies() -> None:
    space, live = moe_space(2, 3), moe_parameters(2, 3)
    with keeps_bits(live):
        found = probe(lambda weights: moe_load(live, weights), live, space)
    cover = found.coverage()
    assert cover.copied_elements == space.total_elements
    assert (cover.empty_elements, cover.opaque_elements, cover.unused_tensors) == (0, 0, ())
    name = "layers.1.mlp.experts.w13_weight"
    assert len(found.slice_copies(name)) <= 2, "a stack of experts is one slice copy for each of gate and up"
    for expert in range(3):
        for part, first in (("gate_proj", 0), ("up_proj", INNER)):
            start, stop = space.id_range(f"layers.1.mlp.experts.{expert}.{part}.weight")
            held = found.ids(name)[expert, first : first + INNER].reshape(-1)
            assert (held[0], held[-1], len(held)) == (start, stop - 1, INNER * HIDDEN)
