"""The command line: faults told all at once, options mapped onto configurations, help at once."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import typer

from pd.cli import _with_empty_spec
from pd.cli_config import launch_config, parse_cores, parse_size, show_cores
from pd.cli_layout import launches, share_cores, share_memory
from pd.cli_options import LaunchOptions, ServeOptions, as_arguments, as_command
from pd.runtime.config import ConfigError, InstanceConfig, RouterConfig
from pd.runtime.keys import make_cluster_key, read_cluster_key
from pd.runtime.wire.values import Role

ALLOWED = sorted(os.sched_getaffinity(0))


def pd(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pd", *arguments], capture_output=True, text=True, timeout=60, check=False
    )


def faults(options: LaunchOptions | ServeOptions) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        launch_config(options) if isinstance(options, LaunchOptions) else launches(options)
    return str(caught.value).splitlines()


# ---- as a person sees it -----------------------------------------------------------------------------------


@pytest.mark.parametrize("command", [[], ["serve"], ["launch"]])
def test_help_loads_nothing_heavy(command: list[str]) -> None:
    script = (
        "import atexit, json, sys; atexit.register(lambda: sys.stderr.write(json.dumps(sorted(sys.modules))))\n"
        f"sys.argv = ['pd', *{command!r}, '--help']\nfrom pd.cli import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0
    assert "Usage: pd" in done.stdout
    loaded = {name.split(".")[0] for name in json.loads(done.stderr)}
    heavy = {"torch", "zmq", "transformers", "numpy", "gguf", "uvicorn", "aiohttp", "asyncio", "pydantic", "rich"}
    assert loaded & heavy == set()


def test_all_faults_are_told_at_once_with_a_hint_and_no_traceback() -> None:
    done = pd("launch", "--role=cook", "--tp=0", "--port=99999", "--page-size=-1", "--router=here", "--cores=x")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.splitlines() == [
        "error: --role is 'cook', must be one of router, prefill, decode, colocated",
        "error: --page-size is -1, must be at least 1",
        "error: --tp is 0, must be at least 1",
        "error: --cores is 'x', must be numbers and ranges, such as 0-3,6",
        "error: --port is 99999, must be 1 to 65535",
        "error: --router is 'here', must be tcp://HOST:PORT with a port of 1 to 65535",
        "",
        "hint: pd launch --help",
    ]


@pytest.mark.parametrize(
    ("arguments", "error", "hint"),
    [
        (["launch"], "Missing option '--role'", "pd launch --help"),
        (["launch", "--role=decode", "--tp=two"], "Invalid value for '--tp'", "pd launch --help"),
        (["launch", "--tepee=2"], "No such option: --tepee", "pd launch --help"),
        (["lunch"], "No such command 'lunch'", "pd --help"),
        (["serve", "/no/such/folder", "--port=0"], "model directory /no/such/folder does not exist", "check the path"),
        (["serve", "--decode", "two"], "--decode \"two\": 'two' is not KEY=VALUE", "such as --decode tp=2; pd serve"),
    ],
)
def test_wrong_use_is_one_error_one_hint_and_status_2(arguments: list[str], error: str, hint: str) -> None:
    done = pd(*arguments)
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: {error}")
    assert f"\n\nhint: {hint}" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(("library", "said"), [("json", "farewell"), ("nixl", ""), ("mooncake", "")])
def test_a_command_that_used_a_library_which_crashes_in_the_farewell_ends_without(library: str, said: str) -> None:
    """Wrong use, too, which is told after the libraries that are here were looked for."""
    script = (
        "import atexit, json, sys; atexit.register(sys.stdout.write, 'farewell')\n"
        f"sys.modules.setdefault({library!r}, json)\n"
        "sys.argv = ['pd', 'bench', 'transfer', '--backend', 'shm', '--prefill-tp', 'x']\n"
        "from pd.cli import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (2, said)
    assert done.stderr.startswith("error: --prefill-tp is 'x': 'x' is no whole number")


def test_a_taken_port_is_told_before_anything_starts() -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        done = pd("serve", f"--port={port}")
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: cannot listen on 127.0.0.1:{port}: Address already in use")
    assert "hint: choose another --port" in done.stderr


def test_version() -> None:
    assert pd("--version").stdout == "pd 0.1.0\n"


# ---- launch ------------------------------------------------------------------------------------------------


def test_every_option_of_an_instance_reaches_its_configuration() -> None:
    core = ALLOWED[0]
    config = launch_config(
        LaunchOptions(
            role="decode",
            name="d",
            model="m",
            served_name="s",
            dtype="float16",
            max_model_len=100,
            device="cpu",
            kernels="torch",
            no_graphs=True,
            tp=3,
            threads=2,
            cores=str(core),
            page_size=32,
            kv_memory="1.5GiB",
            kv_cache_dtype="fp8_e4m3",
            no_prefix_cache=True,
            max_running=7,
            max_prefill_tokens=64,
            transfer="tcp",
            transfer_devices="eth0, eth1",
            transfer_param=["num_threads=4", "engine_config=TLS=tcp,X=y"],
            host="10.0.0.1",
            port=1234,
            router="tcp://[::1]:99",
            insecure=True,
        )
    )
    assert isinstance(config, InstanceConfig)
    assert (config.role, config.name, config.model.model, config.model.served_name) == (Role.DECODE, "d", "m", "s")
    assert (config.model.dtype, config.model.max_model_len) == ("float16", 100)
    assert (config.device.device, config.device.tp, config.device.threads) == ("cpu", 3, 2)
    assert (config.device.kernels, config.device.graphs, config.device.cores) == ("torch", False, (core,))
    assert (config.kv.page_size, config.kv.num_pages, config.kv.kv_memory) == (32, None, 1.5 * 2**30)
    assert (config.kv.prefix_cache, config.kv.dtype) == (False, "fp8_e4m3")
    assert (config.step.max_running, config.step.max_prefill_tokens) == (7, 64)
    assert (config.link.transfer, config.link.transfer_devices) == ("tcp", ("eth0", "eth1"))
    assert config.link.transfer_params == (("num_threads", "4"), ("engine_config", "TLS=tcp,X=y"))
    assert (config.link.host, config.link.port, config.link.router) == ("10.0.0.1", 1234, "tcp://[::1]:99")


def test_defaults_are_the_configurations_own() -> None:
    config = launch_config(LaunchOptions(role="prefill", name="p"))
    assert config == InstanceConfig(role=Role.PREFILL, name="p")
    assert launch_config(LaunchOptions(role="router")) == RouterConfig()


def test_two_bare_launches_have_different_names() -> None:
    first = launch_config(LaunchOptions(role="prefill"))
    assert isinstance(first, InstanceConfig)
    assert str(os.getpid()) in first.name


def test_a_transfer_parameter_is_given_once() -> None:
    given = ["backend=UCX", "x=1", "backend = POSIX", "broken"]
    assert faults(LaunchOptions(role="decode", transfer_param=given)) == [
        "--transfer-param is 'broken', must be KEY=VALUE",
        "--transfer-param gives backend 2 times, must be once",
    ]


def test_a_router_refuses_what_is_for_instances() -> None:
    assert faults(LaunchOptions(role="router", tp=2, no_prefix_cache=True)) == [
        "--tp 2 is for instances; a router has no use for it",
        "--no-prefix-cache is for instances; a router has no use for it",
    ]


def test_an_instance_refuses_what_is_for_routers() -> None:
    assert faults(LaunchOptions(role="decode", api_key_file="keys")) == [
        "--api-key-file keys is for the router; an instance has no use for it",
    ]


@pytest.mark.parametrize(
    "options",
    [
        LaunchOptions(role="decode", host="0.0.0.0"),
        LaunchOptions(role="prefill", host="10.0.0.1"),
        LaunchOptions(role="router", router="tcp://*:8500"),
        LaunchOptions(role="router", router="tcp://gateway:8500"),
    ],
    ids=lambda options: f"{options.role}-{options.host}",
)
def test_without_a_key_only_loopback_is_bound_unless_insecure_is_said(options: LaunchOptions, tmp_path: Path) -> None:
    (fault,) = faults(options)
    assert "without a key only this machine's own processes may reach the links" in fault
    assert launch_config(replace(options, insecure=True)).link.insecure
    make_cluster_key(tmp_path / "key")
    key = str(tmp_path / "key")
    assert launch_config(replace(options, cluster_key=key)).link.cluster_key == key


@pytest.mark.parametrize("router", ["tcp://127.0.0.1:8500", "tcp://localhost:8500", "tcp://[::1]:8500"])
def test_loopback_needs_no_key_wherever_http_listens(router: str) -> None:
    assert launch_config(LaunchOptions(role="router", router=router, host="0.0.0.0")).link.cluster_key is None


@pytest.mark.parametrize("deadline", [0.0, -1.0, float("inf"), float("nan")])
def test_a_deadline_is_a_number_of_seconds(deadline: float) -> None:
    (fault,) = faults(LaunchOptions(role="router", deadline=deadline))
    assert fault == f"--deadline is {deadline:g}, must be a number of seconds above 0"


def test_the_router_alone_is_told_to_verify() -> None:
    config = launch_config(LaunchOptions(role="router", verify_kv=True))
    assert isinstance(config, RouterConfig) and config.verify_kv
    router, *instances = launches(ServeOptions(verify_kv=True))
    assert router.verify_kv and not any(instance.verify_kv for instance in instances)
    (fault,) = faults(LaunchOptions(role="decode", verify_kv=True))
    assert fault == "--verify-kv is for the router; an instance has no use for it"


def test_layers_are_streamed_by_who_writes() -> None:
    config = launch_config(LaunchOptions(role="prefill", stream_layers=8))
    assert isinstance(config, InstanceConfig) and config.link.stream_layers == 8
    with pytest.raises(ConfigError, match="--stream-layers 8 is for KV that prefill writes"):
        launches(ServeOptions(stream_layers=8, direction="pull"))
    with pytest.raises(ConfigError, match="--stream-layers 8 is for KV that goes while it is computed, and with --res"):
        launches(ServeOptions(stream_layers=8, reserve="late"))
    (fault,) = faults(LaunchOptions(role="prefill", stream_layers=0))
    assert fault == "--stream-layers is 0, must be at least 1"


@pytest.mark.parametrize("role", ["decode", "colocated"])
def test_layers_are_streamed_by_nobody_else(role: str) -> None:
    (fault,) = faults(LaunchOptions(role=role, stream_layers=8))
    assert fault == f"--stream-layers 8 is for a prefill instance; a {role} one has no use for it"
    one = ["tp=1"]
    given = launches(ServeOptions(stream_layers=8, colocated=one, prefill=one, decode=one))
    by_role = {each.role: each.stream_layers for each in given}
    assert by_role == {"router": None, "prefill": 8, "decode": None, "colocated": None}
    with pytest.raises(ConfigError, match="--stream-layers 8 is for prefill instances, and there is none"):
        launches(ServeOptions(stream_layers=8, colocated=one))


def test_attempts_and_deadline_reach_the_router() -> None:
    config = launch_config(LaunchOptions(role="router", max_attempts=7, deadline=2.5))
    assert isinstance(config, RouterConfig)
    assert (config.max_attempts, config.request_s) == (7, 2.5)
    router, *_ = launches(ServeOptions(max_attempts=7, deadline=2.5))
    assert (router.max_attempts, router.deadline) == (7, 2.5)


def test_a_bad_key_file_is_told_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("hello")
    (tmp_path / "key").chmod(0o600)
    for done in (
        pd("launch", "--role=decode", f"--cluster-key={tmp_path}/key"),
        pd("serve", "--port=0", f"--cluster-key={tmp_path}/key"),
    ):
        assert done.returncode == 2
        assert done.stderr.startswith(f"error: --cluster-key {tmp_path}/key holds no cluster key\n\nhint: pd key")


def test_pd_key_makes_a_key_that_is_taken(tmp_path: Path) -> None:
    done = pd("key", str(tmp_path / "key"))
    assert (done.returncode, done.stderr) == (0, "")
    assert read_cluster_key(str(tmp_path / "key")) is not None
    assert pd("key", str(tmp_path / "key")).returncode == 2


def test_serve_gives_the_cluster_key_to_all_and_the_api_keys_to_the_router_alone(tmp_path: Path) -> None:
    make_cluster_key(tmp_path / "key")
    (tmp_path / "api").write_text("a" * 20)
    (tmp_path / "api").chmod(0o600)
    router, *others = launches(ServeOptions(cluster_key=str(tmp_path / "key"), api_key_file=str(tmp_path / "api")))
    assert {one.cluster_key for one in (router, *others)} == {str(tmp_path / "key")}
    assert router.api_key_file == str(tmp_path / "api")
    assert {one.api_key_file for one in others} == {None}


def test_two_ways_to_size_the_pool_are_one_too_many() -> None:
    options = LaunchOptions(role="decode", num_pages=3, kv_memory="1GiB")
    assert faults(options) == ["--num-pages 3 and --kv-memory 1GiB both size the pool"]


def test_a_core_we_may_not_use_is_named() -> None:
    assert faults(LaunchOptions(role="decode", cores=f"{ALLOWED[0]},9999")) == [
        f"--cores names 9999; this process may use {show_cores(ALLOWED)}"
    ]


@pytest.mark.parametrize(
    ("text", "size"),
    [("0.8", 0.8), ("4GiB", 4 << 30), ("1.5g", 1.5 * (1 << 30)), ("512 MB", 512 << 20), ("1000000", 1e6)]
    + [(text, None) for text in ("", "0", "-1", "GiB", "1 XB", "1e3")],
)
def test_sizes(text: str, size: float | None) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("seed", range(20))
def test_cores_are_shown_as_they_are_read(seed: int) -> None:
    chance = random.Random(seed)
    cores = tuple(sorted(chance.sample(range(40), chance.randrange(1, 20))))
    assert parse_cores(show_cores(cores)) == cores, f"seed={seed}"


@pytest.mark.parametrize("text", ["", "a", "3-1", "1,,2", "-1", "1-2-3"])
def test_malformed_cores(text: str) -> None:
    assert parse_cores(text) is None


# ---- serve -------------------------------------------------------------------------------------------------


def test_the_bare_layout_is_a_router_a_prefill_and_a_decode() -> None:
    router, *instances = launches(ServeOptions())
    assert router.role == "router"
    assert [(one.role, one.name, one.tp) for one in instances] == [
        ("prefill", "prefill-0", 1),
        ("decode", "decode-0", 1),
    ]


def test_instances_are_as_their_texts_say_and_share_the_rest() -> None:
    options = ServeOptions(
        prefill=["tp=2", f"tp=3,name=big,num-pages=9,threads=1,cores={ALLOWED[0]}"],
        decode=[""],
        page_size=8,
        num_pages=5,
        host="0.0.0.0",
        device="cpu",
    )
    router, first, second, decode = launches(options)
    assert (router.host, first.host) == ("0.0.0.0", "127.0.0.1")
    assert (first.name, first.tp, first.num_pages, first.page_size) == ("prefill-0", 2, 5, 8)
    assert (second.name, second.tp, second.num_pages, second.threads) == ("big", 3, 9, 1)
    assert second.cores == str(ALLOWED[0])
    assert (decode.name, decode.tp) == ("decode-0", 1)


def test_bare_colocated_is_one_instance_of_both() -> None:
    assert _with_empty_spec(["serve", "--colocated"]) == ["serve", "--colocated="]
    assert _with_empty_spec(["serve", "--colocated", "model"]) == ["serve", "--colocated=", "model"]
    assert _with_empty_spec(["--colocated", "--port=1"]) == ["--colocated=", "--port=1"]
    assert _with_empty_spec(["--colocated", "tp=2"]) == ["--colocated", "tp=2"]
    _, one = launches(ServeOptions(colocated=[""]))
    assert (one.role, one.name) == ("colocated", "colocated-0")


def test_serves_faults_are_told_at_once_and_say_which_instance() -> None:
    options = ServeOptions(
        prefill=["tp=0,speed=9", "tp=x", "name=a"], decode=["name=a"], restart="maybe", port=-1, dtype="int8"
    )
    assert faults(options) == [
        "--dtype is 'int8', must be one of auto, float32, bfloat16, float16",
        "--restart is 'maybe', must be one of always, never",
        "--port is -1, must be 0 to 65535",
        "--prefill \"tp=0,speed=9\": unknown key 'speed', known are tp, name, num-pages, threads, cores",
        '--prefill "tp=0,speed=9": --tp is 0, must be at least 1',
        '--prefill "tp=x": tp=x is no number',
        "two instances are named a",
    ]
    lonely = ServeOptions(colocated=[""], prefill=[""])
    assert faults(lonely) == ["beside --colocated, --prefill and --decode come in pairs or not at all"]


def test_pools_of_ranks_that_share_a_gpu_share_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    _, *fitting = launches(ServeOptions(model="m", device="cuda"))
    assert share_memory(fitting) == fitting
    options = ServeOptions(model="m", device="cuda", prefill=["tp=2"], decode=["tp=1", "tp=1,num-pages=9"])
    _, *sharing = launches(options)
    assert [one.kv_memory for one in share_memory(sharing)] == ["0.450", "0.450", None]
    _, *on_cpu = launches(ServeOptions(model="m", device="cpu", prefill=["", "", ""]))
    assert share_memory(on_cpu) == on_cpu


@pytest.mark.parametrize("seed", range(50))
def test_cores_are_shared_out_whole_and_fairly(seed: int) -> None:
    chance = random.Random(seed)
    cores = list(range(chance.randrange(1, 65)))
    weights = [chance.randrange(1, 9) for _ in range(chance.randrange(1, 6))]
    shares = share_cores(cores, weights)
    if len(cores) < len(weights):
        assert shares == [tuple(cores)] * len(weights), f"seed={seed}"
        return
    assert [core for share in shares for core in share] == cores, f"seed={seed}"
    for share, weight in zip(shares, weights, strict=True):
        fair = len(cores) * weight / sum(weights)
        assert len(share) >= max(1, int(fair) - len(weights)), f"seed={seed}"


@pytest.mark.parametrize("seed", range(20))
def test_a_childs_command_line_gives_its_options_back(seed: int) -> None:
    chance = random.Random(seed)
    sent = LaunchOptions(
        role=chance.choice(["prefill", "decode", "colocated"]),
        model=chance.choice([None, "-odd name", "/a b/c"]),
        served_name=chance.choice([None, "x=y", "--tp"]),
        tp=chance.choice([1, 2]),
        cores=chance.choice([None, str(ALLOWED[0])]),
        no_prefix_cache=chance.choice([True, False]),
        kv_memory=chance.choice([None, "0.5"]),
        transfer_devices=chance.choice([None, "mlx5_0:1,mlx5_1:1"]),
        transfer_param=chance.choice([None, ["protocol=rdma"], ["backend=UCX", "engine_config=TLS=tcp,A=b c"]]),
        stream_layers=chance.choice([None, 2]),
        verify_kv=chance.choice([True, False]),
    )
    got: list[LaunchOptions] = []

    def keep(options: LaunchOptions) -> None:
        got.append(options)

    app = typer.Typer()
    app.command()(as_command(keep, LaunchOptions))
    app(as_arguments(sent), standalone_mode=False)
    assert got == [sent], f"seed={seed}"


def test_an_unwritable_cache_is_no_traceback(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    done = subprocess.run(
        [sys.executable, "-m", "pd", "serve", "--port=0"],
        env={**os.environ, "XDG_CACHE_HOME": str(tmp_path / "taken")},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.startswith("error: cannot make the cache folder")
