"""`transload plan` and `transload simulate`: their keys, their tables, and errors without tracebacks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from adapters.cli.main import app
from adapters.deployments import read_deployment

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "deployments"
FIGURE = FOLDER / "figure2-cross.toml"
PLAN_KEYS = {
    "link_load_over_bound", "trainer_copies_sent", "node_ingress_over_need", "rounds", "plan_seconds",
    "peak_rss_bytes", "program_bytes_max",
}  # fmt: skip
SIMULATION_KEYS = {"end_to_end_over_bound", "stall_over_bound", "binding_link"}


def run(*words: object, code: int = 0) -> str:
    done = CliRunner().invoke(app, [str(word) for word in words])
    assert done.exit_code == code, done.output
    assert "Traceback" not in done.output
    return done.output


def test_plan_as_json() -> None:
    found = json.loads(run("plan", FIGURE, "--json"))
    assert found.keys() >= PLAN_KEYS
    assert found["link_load_over_bound"] <= 1.02
    assert found["trainer_copies_sent"] == 1.0
    assert found["node_ingress_over_need"] == 1.0
    assert found["programs"] == 8
    assert found["bound_s"] <= found["optimum_s"] <= found["load_s"]
    assert 1 <= found["peers_max"] <= 7
    assert found["messages"] >= found["peers_max"]
    assert found["program_bytes_max"] > 0
    smaller = json.loads(run("plan", FIGURE, "--json", "--buffer", 1024, "--programs", 1))
    assert smaller["rounds"] > found["rounds"]
    assert smaller["programs"] == 1


def test_keeping_pieces_together() -> None:
    apart = json.loads(run("plan", FIGURE, "--json", "--programs", 1))
    for unit in ("tensor", 64):
        found = json.loads(run("plan", FIGURE, "--json", "--programs", 1, "--keep-together", unit))
        assert found["rounds"] >= apart["rounds"]
        assert found["load_s"] == apart["load_s"]
        assert found["round_load_over_average"] >= 1.0
    assert apart["round_load_over_average"] == pytest.approx(1.0, abs=0.05)
    assert "one buffer of" in run("plan", FIGURE, "--buffer", 1024, "--keep-together", "tensor", code=2)
    assert "--keep-together layer: expected tensor" in run("plan", FIGURE, "--keep-together", "layer", code=2)


def test_simulate_as_json_with_baselines() -> None:
    found = json.loads(run("simulate", FIGURE, "--json", "--compare", "--round-overhead", 0, "--depth", 3))
    assert found.keys() >= SIMULATION_KEYS
    assert (found["depth"], found["round_overhead_s"]) == (3, 0.0)
    assert set(found["baselines"]) == {"gather and broadcast", "first holder", "round robin"}
    for line in found["baselines"].values():
        assert line.keys() >= SIMULATION_KEYS
        assert line["end_to_end_over_bound"] >= found["end_to_end_over_bound"] * 0.999
    assert "baselines" not in json.loads(run("simulate", FIGURE, "--json"))


def test_a_sweep() -> None:
    vary = ["--vary", "rollout.engines=1,2", "--vary", "rollout.dp=4,2", "--vary", "cluster.nic_bytes_per_s=25e9"]
    found = json.loads(run("simulate", FIGURE, "--json", "--compare", *vary))
    assert [point["changes"] for point in found["points"]] == [
        {"rollout.engines": 1, "rollout.dp": 4, "cluster.nic_bytes_per_s": 25e9},
        {"rollout.engines": 2, "rollout.dp": 2, "cluster.nic_bytes_per_s": 25e9},
    ]
    for point in found["points"]:
        assert point["link_load_over_bound"] <= 1.02
        assert (point["trainer_copies_sent"], point["node_ingress_over_need"]) == (1.0, 1.0)
        for name, speedup in point["speedups"].items():
            theirs = point["simulation"]["baselines"][name]["end_to_end_s"]
            assert speedup == pytest.approx(theirs / point["simulation"]["end_to_end_s"])
    apart = json.loads(run("simulate", FIGURE, "--json"))
    assert found["points"][1]["simulation"]["bound_s"] == pytest.approx(2 * apart["bound_s"]), "half the speed"
    table = run("simulate", FIGURE, "--compare", *vary)
    assert "engines" in table
    assert "Nothing here was measured" in table
    for bad, message in [
        (["rollout.engines=1,2,4", "rollout.dp=4,2"], "rollout.engines has 3, rollout.dp has 2"),
        (["rollout.engines=1", "rollout.engines=2"], "is varied twice"),
        (["engines=1"], "expected section.key=value,value"),
        (["rollout.engines=x"], "'x' is no number"),
        (["rollout.engines=3"], "figure2-cross.toml with rollout.engines 3: rollout: engines 3"),
        (["rollout.engine=1"], "figure2-cross.toml with rollout.engine 1: rollout: unknown key 'engine'"),
        (["rollout.engines=1.5"], "rollout.engines: 1.5; expected a whole number"),
        (["cluster.nic_bytes_per_s=1e-300"], "with cluster.nic_bytes_per_s 1e-300: node 0"),
    ]:
        words = [word for each in bad for word in ("--vary", each)]
        assert message in " ".join(run("simulate", FIGURE, *words, code=2).split())
    assert "--vary changes numbers of a deployment file" in run("simulate", "--vary", "rollout.tp=1", code=2)


@pytest.mark.slow
@pytest.mark.parametrize("overhead", ["1e-3", "1e-4"])
def test_ends_of_the_papers_sweeps(overhead: str) -> None:
    """One trainer node to 1 and 16 replicas, four trainer nodes to four: the bars for two buffers of 512 MiB."""
    vary = ["trainer.nodes=1,1,4", "trainer.dp=2,2,8", "rollout.engines=1,16,4", "rollout.nodes=1,16,4"]
    words = [word for each in vary for word in ("--vary", each)]
    file = FOLDER / "qwen3-30b-a3b.toml"
    found = json.loads(run("simulate", file, "--json", "--round-overhead", overhead, *words))
    for point in found["points"]:
        assert point["link_load_over_bound"] <= 1.02
        assert (point["trainer_copies_sent"], point["node_ingress_over_need"]) == (1.0, 1.0)
        assert point["simulation"]["end_to_end_over_bound"] <= (1.20 if overhead == "1e-3" else 1.08)


def test_tables() -> None:
    assert "trainers send" in run("plan", FIGURE)
    table = run("simulate", FIGURE, "--compare")
    assert "round robin" in table
    assert "Nothing here was measured" in table


def test_names_are_no_markup(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(FIGURE.read_text().replace('name = "', 'name = "[/x] ', 1))
    assert "[/x]" in run("plan", path)
    assert "[/x]" in run("simulate", path)
    for value, words in (("1" + "0" * 400, "too large a number"), ("[" * 3000, "no TOML")):
        path.write_text(FIGURE.read_text().replace("50e9", value, 1))
        assert words in " ".join(run("plan", path, code=2).split())
    assert "--keep-together" in run("plan", FIGURE, "--keep-together", "\u00b2", code=2)


def test_saved_maps_give_the_same_plan(tmp_path: Path) -> None:
    deployment = read_deployment(FIGURE)
    _, holders, needers = deployment.maps()
    for worker, each in {**holders, **needers}.items():
        (tmp_path / f"{worker.replace('/', '-')}.map").write_bytes(each.to_bytes())
    cluster = tmp_path / "cluster.toml"
    cluster.write_text(
        "[uniform]\ntrainers = 4\nengines = 2\nengine_size = 2\nworkers_per_node = 4\n"
        "nic_bytes_per_s = 50e9\nlocal_bytes_per_s = 450e9\n"
    )
    ours = json.loads(run("plan", "--maps", tmp_path, "--topology", cluster, "--json"))
    theirs = json.loads(run("plan", FIGURE, "--json"))
    for key in ("bound_s", "load_s", "routes", "rounds", "program_bytes_max", "model_bytes", "distinct_maps"):
        assert ours[key] == theirs[key], key
    assert "simulated" in run("simulate", "--maps", tmp_path, "--topology", cluster)
    (tmp_path / "engine-1-0.map").write_bytes(b"no map")
    assert "engine-1-0.map" in run("plan", "--maps", tmp_path, "--topology", cluster, code=2)
    (tmp_path / "engine-1-0.map").unlink()
    assert "it is the map of engine/1/0" in run("plan", "--maps", tmp_path, "--topology", cluster, code=2)


@pytest.mark.parametrize("command", ["plan", "simulate"])
def test_errors_name_the_place(tmp_path: Path, command: str) -> None:
    assert "deployment file" in run(command, code=2)
    assert "--topology" in run(command, "--maps", tmp_path, code=2)
    assert "cannot be read" in run(command, tmp_path / "none.toml", code=2)
    path = tmp_path / "mine.toml"
    path.write_text(FIGURE.read_text().replace("nodes = 1", "nodes = 3", 1))
    assert "mine.toml: trainer: tp 2" in run(command, path, code=2)
    assert "buffer_bytes is 1" in run(command, FIGURE, "--buffer", 1, code=2)
    cluster = tmp_path / "cluster.toml"
    cluster.write_text("[uniform]\ntrainer = 4\n")
    assert "cluster.toml" in run(command, FIGURE, "--topology", cluster, code=2)
    uniform = "engines = 2\nengine_size = 2\nworkers_per_node = 4\nnic_bytes_per_s = 50e9\nlocal_bytes_per_s = 450e9\n"
    cluster.write_text(f"[uniform]\ntrainers = 3\n{uniform}")
    assert "cluster.toml: trainer/3: in no node" in run(command, FIGURE, "--topology", cluster, code=2)
    for old, new, message in [
        ("50e9", "1e-300", "mine.toml: node 0 (node 0): NIC egress of trainer/0 is 1e-300"),
        ("hidden_size = 64", "hidden_size = 100000000000000", "mine.toml: checkpoint has"),
        ("[model]", '[model]\nconfig = "config.json"', "mine.toml: model.config: expected alone"),
        ("ep = 2", "ep = 3", "mine.toml: trainer: ep 3 x etp 1 do not divide"),
        ("tp = 2", "tp = 0", "mine.toml: trainer.tp: 0; expected a whole number above zero"),
        ("[rollout]", "[update]\ndepth = 0\n[rollout]", "mine.toml: update.depth: 0"),
    ]:
        path.write_text(FIGURE.read_text().replace(old, new, 1))
        assert message in " ".join(run(command, path, code=2).split())
