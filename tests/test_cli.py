from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from pagetile.cli import main
from pagetile.cli.app import app
from pagetile.cli.prompts import BUILT_IN
from pagetile.demo import path as demo_path
from pagetile.engine.step import SampledTokens
from pagetile.errors import GenerationError

SMALL = ["--num-blocks", "64", "--max-num-seqs", "8"]
GREEDY = ["--temperature", "0", "--max-tokens", "6", *SMALL]


@pytest.fixture
def run(capsys):
    """Runs the command line in this process: (exit code, stdout, stderr)."""

    def call(*args: str) -> tuple[int, str, str]:
        code = main(args)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


@pytest.fixture
def pipe_in(monkeypatch):
    """Puts bytes into a pipe that is this process's standard input."""

    readers = []

    def put(data: bytes) -> None:
        reader, writer = os.pipe()
        os.write(writer, data)
        os.close(writer)
        readers.append(os.fdopen(reader))
        monkeypatch.setattr(sys, "stdin", readers[-1])

    yield put
    for reader in readers:
        reader.close()


def _start(*args: str) -> subprocess.Popen[bytes]:
    def listen_to_ctrl_c() -> None:
        # What a shell starts in the background, a test run for instance, ignores it.
        signal.signal(signal.SIGINT, signal.default_int_handler)

    pipe = subprocess.PIPE
    command = [sys.executable, "-m", "pagetile", *args]
    return subprocess.Popen(
        command, stdin=pipe, stdout=pipe, stderr=pipe, bufsize=0, preexec_fn=listen_to_ctrl_c
    )


# --- help -----------------------------------------------------------------------------------


def test_help_names_the_commands():
    for args in (["--help"], ["-h"], []):
        result = CliRunner().invoke(app, args)
        assert result.exit_code == 0
        assert "generate" in result.stdout
        assert "plan" in result.stdout


@pytest.mark.parametrize("command", ["generate", "plan"])
def test_help_of_a_command_is_narrow_and_has_examples(command):
    result = CliRunner().invoke(app, [command, "--help"])
    assert result.exit_code == 0
    assert f"pagetile {command} " in result.stdout.split("Examples")[1]
    assert max(map(len, result.stdout.splitlines())) <= 80


def test_version():
    result = CliRunner().invoke(app, ["--version"])
    assert result.exit_code == 0
    assert re.fullmatch(r"pagetile \d+\.\d+\.\d+\S*\n", result.stdout)


@pytest.mark.parametrize(
    ("typed", "completed"),
    [("pagetile gen", "generate"), ("pagetile generate --temp", "--temperature")],
)
def test_a_shell_completes_commands_and_options(typed, completed, monkeypatch, capsys):
    monkeypatch.setenv("_PAGETILE_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", typed)
    monkeypatch.setenv("COMP_CWORD", str(len(typed.split()) - 1))
    assert main([]) == 0
    assert capsys.readouterr().out.split() == [completed]


def test_torch_s_threads_are_told_not_to_spin_before_torch_is_there():
    code = (
        "import os, sys; from pagetile.cli import main; main(['generate', '--help']);"
        "assert 'torch' not in sys.modules; assert os.environ['OMP_WAIT_POLICY'] == 'PASSIVE'"
    )
    env = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    subprocess.run([sys.executable, "-c", code], check=True, env=env, stdout=subprocess.DEVNULL)


def test_help_does_not_wait_for_torch():
    code = (
        "import sys; from pagetile.cli import main; main(['generate', '--help']);"
        "sys.exit(bool({'torch', 'transformers', 'numpy'} & set(sys.modules)))"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)


MISSING = "not installed: pip install 'pagetile[engine]', or in a checkout"


def test_a_command_line_without_typer_names_the_extra():
    code = (
        "import sys; sys.modules['typer'] = None;"
        "from pagetile.cli import main; sys.exit(main(['generate', 'x']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 2
    assert "typer" in done.stderr
    assert MISSING in done.stderr


def test_generate_without_transformers_names_the_extra(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    code, out, err = run("generate", "x")
    assert (code, out) == (2, "")
    assert "transformers" in err
    assert MISSING in err


# --- mistakes -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ("gen", "No such command 'gen'"),
        ("generate --tempreature 1", "--tempreature"),
        ("generate --n x", "--n"),
        ("generate --dtype int3", "int3"),
        ("generate --n", "--n"),
        ("generate --n 0", "n=0: expected an integer >= 1"),
        ("generate --max-tokens 0", "max_tokens=0"),
        ("generate --temperature nan", "temperature=nan"),
        ("generate --temperature -1", "temperature=-1.0"),
        ("generate --top-p 2", "top_p=2.0"),
        ("generate --top-k -7", "top_k=-7"),
        ("generate --stop=", "stop="),
        ("generate a --file b", "leave one of them out"),
        ("generate --file no/such/file.py", "no/such/file.py: No such file or directory"),
        ("generate --file .", "Is a directory"),
        ("generate x --model no/such/model", "no/such/model"),
        ("generate x --block-size 0", "block_size=0: expected a whole number from 1 to 256"),
        ("generate x --num-blocks 0", "num_blocks=0"),
        ("generate x --max-num-seqs 0", "max_num_seqs=0"),
        ("generate x --max-model-len 1000000", "max_model_len"),
        ("generate x --num-blocks 2 --max-model-len 100", "max_model_len=100"),
        ("generate x --n 9 --max-num-seqs 8", "n=9"),
        ("generate x --n 99999999999999999999", "is more than max_num_seqs=128"),
        ("generate x --num-blocks 99999999999999999999", "do not fit into"),
        ("generate x --device foo", "device='foo'"),
        ("generat x", "Did you mean 'generate'? See pagetile --help"),
        ("serve --max-queued -1", "'--max-queued': expected at least 0: see"),
        ("serve --max-body-bytes 0", "'--max-body-bytes': expected at least 1: see"),
        ("serve --port 65536", "'--port': expected at most 65535: see"),
        ("serve --drain-seconds -1", "--drain-seconds -1: expected 0 or more"),
        ("serve --drain-seconds nan", "--drain-seconds nan: expected 0 or more"),
        ("serve --gpu-memory-utilization 2", "memory_fraction=2.0: expected a number in (0, 1]"),
        ("serve --max-num-batched-tokens 5", "max_num_batched_tokens=5: expected"),
        ("serve --num-blocks 64 --host 192.0.2.1", "choose another --host"),
        ("generate x --max-tokens y", "'--max-tokens': expected an integer: see"),
        ("generate x --temperature y", "'--temperature': expected a number: see"),
        ("generate x --dtype fp16", "'--dtype': 'fp16' is not one of 'auto', 'float32'"),
        (
            "generate x --gpu-memory-utilization 0.9",
            "which is vLLM's. Give --num-blocks, or memory",
        ),
        ("serve --served-model-name=", "--served-model-name is empty: give a name, or leave it"),
        ("serve --cors-origin here", "--cors-origin here: expected an origin such as https://"),
        ("serve --cors-origin https://here/", "expected an origin such as https://example.com"),
        ("serve --model here", "which is vLLM's. Give the checkpoint's folder without it"),
        ("serve --ssl-keyfile x", "which is vLLM's. Put a proxy in front of the server for HTTPS"),
        ("serve --allowed-origins x", "which is vLLM's. Give --cors-origin: see"),
        ("serve --quantization awq", "--quantization, which is vLLM's. Weights are not quantised"),
        ("serve --tensor-parallel-size 2", "a model runs on one device: see pagetile serve --help"),
        ("chat 127.0.0.1:8000", "is not a folder: did you mean http://127.0.0.1:8000?"),
        ("chat ftp://here", "ftp://here: expected an address with http:// or https://"),
        (
            "chat --model gpt-5",
            "no server's address is given: for a checkpoint, pagetile chat gpt-5",
        ),
        ("chat --api-key k", "--api-key is for a server, but no server's address is given"),
        ("chat http://127.0.0.1:9 --chat-template plain", "the server has its own"),
        ("chat http://127.0.0.1:9", "Start a server there with pagetile serve"),
        ("generate x --chat", "--chat: this model's tokenizer has no chat template. Leave out"),
        (f"generate x --model {__file__}", "is a file, expected a directory with a checkpoint"),
        ("plan --memory 3Q", "'3Q' is not a memory size"),
        ("plan --memory 1MB", "are missing"),
        ("plan --memory 16", "--memory 16 is 16 bytes: did you mean 16GiB?"),
        ("plan --block-size 1000", "block_size is 1000"),
        ("plan --model no/such/model", "no/such/model"),
        ("plan --lengths 5,x", "lengths '5,x'"),
        ("plan --lengths 5,1000000", "1000000 is more than"),
        ("plan --mean-len 0", "mean length 0"),
        ("plan --mean-len 5 --lengths 5", "leave one of them out"),
    ],
)
def test_a_mistake_is_one_line(args, message, run):
    code, out, err = run(*args.split())
    assert code == 2
    assert out == ""
    assert re.fullmatch(r"pagetile: .*\n", err)
    assert message in err
    assert "Traceback" not in err


def test_a_prompt_that_cannot_be_served_is_one_line(run):
    for prompts, message in (
        ([""], "prompt 0 is empty"),
        (["fine", ""], "prompt 1 is empty"),
        (["fine", "word " * 3000], "prompt 1: the prompt has"),
        (["word " * 3000], "tokens, expected fewer than max_model_len"),
        (["\udcff"], "prompt 0 is not UTF-8 text: byte 0xff at 0"),
    ):
        code, out, err = run("generate", *SMALL, "--", *prompts)
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert message in err


def test_text_that_is_not_utf8(run, pipe_in, tmp_path):
    (tmp_path / "latin").write_bytes(b"caf\xe9")
    code, out, err = run("generate", "--file", str(tmp_path / "latin"))
    assert (code, out) == (2, "")
    assert err.endswith("latin is not UTF-8 text: byte 0xe9 at 3\n")
    pipe_in(b"\xff")
    assert run("generate")[2] == ("pagetile: standard input is not UTF-8 text: byte 0xff at 0\n")


def test_a_truncated_checkpoint_is_one_line(run, tmp_path):
    for file in demo_path().glob("*.json"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = (demo_path() / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(weights[:100_000])
    code, out, err = run("generate", "x", "--model", str(tmp_path))
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "model.safetensors" in err


def test_an_unexpected_error_is_one_line(run, monkeypatch):
    def fail(*args: object) -> None:
        raise ZeroDivisionError("first line\nsecond line")

    monkeypatch.setattr("pagetile.cli.generate.read_prompts", fail)
    assert run("generate") == (
        1,
        "",
        "pagetile: ZeroDivisionError: first line second line (PAGETILE_DEBUG=1 shows where)\n",
    )
    monkeypatch.setenv("PAGETILE_DEBUG", "1")
    with pytest.raises(ZeroDivisionError):
        run("generate")


# --- generate -------------------------------------------------------------------------------


def test_one_prompt_is_echoed_and_continued(run):
    code, out, err = run("generate", "def add(a, b):", *GREEDY)
    assert code == 0
    assert out.startswith("def add(a, b):")
    assert len(out) > len("def add(a, b):\n")
    assert out.endswith("\n")
    for row in ("blocks in use", "shared", "reused", "copied on write", "wasted", "preempted"):
        assert re.search(rf"^{row} +\d", err, re.MULTILINE)
    assert re.search(r"^output +6 tokens, [\d.,]+ a second$", err, re.MULTILINE)
    assert re.search(r"^first token +after \d+\.\d+ s$", err, re.MULTILINE)
    assert "\x1b" not in out + err


def test_a_file_a_pipe_and_an_argument_are_the_same_prompt(run, pipe_in, tmp_path):
    text = "import os\n\n\nclass Näme:\n"
    expected = run("generate", text[:-1], *GREEDY)[1]
    (tmp_path / "draft.py").write_text(text, encoding="utf-8")
    assert run("generate", "--file", str(tmp_path / "draft.py"), *GREEDY)[1] == expected
    pipe_in(text.encode())
    assert run("generate", *GREEDY)[1] == expected
    pipe_in(text.encode())
    assert run("generate", "--file", "-", *GREEDY)[1] == expected


def test_without_any_prompt_there_is_a_built_in_one(run):
    code, out, _ = run("generate", *GREEDY)
    assert code == 0
    assert out.startswith(BUILT_IN)


def test_an_empty_pipe_is_an_empty_prompt(run, pipe_in):
    pipe_in(b"")
    code, _, err = run("generate", *GREEDY)
    assert (code, err.count("\n")) == (2, 1)
    assert "standard input is empty" in err


def test_samples_come_in_order_and_whole(run):
    code, out, err = run("generate", "x = ", "--n", "3", "--seed", "7", "--max-tokens", "6", *SMALL)
    assert code == 0
    pieces = re.split(r"^--- (.*) ---\n", out, flags=re.MULTILINE)[1:]
    assert pieces[::2] == ["sample 0", "sample 1", "sample 2"]
    assert all(text.startswith("x = ") for text in pieces[1::2])
    assert len(set(pieces[1::2])) > 1
    assert "%|" not in err  # no progress bar where stderr is not a terminal


def test_several_prompts_give_what_each_gives_alone(run):
    prompts = ["def add(a, b):", "import os\n"]
    _, out, _ = run("generate", *prompts, "--no-echo", *GREEDY)
    pieces = re.split(r"^--- (.*) ---\n", out, flags=re.MULTILINE)[1:]
    assert pieces[::2] == ["prompt 0", "prompt 1"]
    for prompt, text in zip(prompts, pieces[1::2], strict=True):
        assert text.strip() == run("generate", prompt, "--no-echo", *GREEDY)[1].strip()


def test_a_chat_needs_a_template(run, tmp_path):
    code, _, err = run("generate", "hello", "--chat", *GREEDY)
    assert code == 2
    assert "no chat template" in err
    shutil.copytree(demo_path(), tmp_path / "model")
    template = "{{ bos_token }}# {{ messages[0].content }}"
    (tmp_path / "model" / "chat_template.jinja").write_text(template)
    model = ["--model", str(tmp_path / "model")]
    code, out, _ = run("generate", "Read a file.", "--chat", *model, *GREEDY)
    assert code == 0
    text = run("generate", "# Read a file.", "--no-echo", *GREEDY)[1]
    assert out == text


def test_sampling_defaults_are_those_of_the_checkpoint(run, tmp_path):
    shutil.copytree(demo_path(), tmp_path / "model")
    recommended = json.dumps({"eos_token_id": 0, "temperature": 0.0, "max_new_tokens": 5})
    (tmp_path / "model" / "generation_config.json").write_text(recommended)
    model = ["x = ", "--no-echo", "--seed", "3", "--model", str(tmp_path / "model"), *SMALL]
    by_default = run("generate", *model)[1]
    assert by_default == run("generate", *model, "--temperature", "0", "--max-tokens", "5")[1]
    drawn = run("generate", *model, "--temperature", "1", "--max-tokens", "5")[1]
    assert drawn != by_default
    options = ["--no-generation-config", "--max-tokens", "5"]
    assert run("generate", *model, *options)[1] == drawn


@pytest.mark.parametrize("command", [["generate", "x", "--max-tokens", "1", "--model"], ["serve"]])
def test_recommended_defaults_are_read_once(run, tmp_path, monkeypatch, command):
    shutil.copytree(demo_path(), tmp_path / "model")
    path = tmp_path / "model" / "generation_config.json"
    path.write_text('{"temperature": 0.5}')
    num_reads, configs = 0, []
    read_text = Path.read_text

    def counted(self, *args, **options):
        nonlocal num_reads
        num_reads += self == path
        return read_text(self, *args, **options)

    async def serve(app, llm, **options):
        configs.append(app.state.server.config)
        await llm.close()
        return 0

    monkeypatch.setattr(Path, "read_text", counted)
    monkeypatch.setattr("pagetile.server.serve", serve)
    code, _, err = run(*command, str(path.parent), *SMALL)
    assert code == 0, err
    assert num_reads == 1
    for config in configs:
        assert config.sampling_defaults == {"temperature": 0.5}


def test_a_busy_port_is_reported_before_the_model_is_loaded(run, monkeypatch):
    monkeypatch.setattr("pagetile.cli.serve.load", lambda **_: pytest.fail("loaded"))
    with socket.create_server(("127.0.0.1", 0)) as busy:
        port = busy.getsockname()[1]
        code, _, err = run("serve", "--port", str(port))
    assert code == 2
    assert f"cannot listen at 127.0.0.1:{port}: Address already in use" in err


def test_a_server_says_what_it_serves_and_where(run, monkeypatch):
    async def serve(app, llm, *, on_start, **options):
        on_start("http://here")
        await llm.close()
        return 0

    monkeypatch.setattr("pagetile.server.serve", serve)
    code, _, err = run("serve", "--quiet", "--device", "cpu", *SMALL)
    assert code == 0
    assert "pagetile-demo at http://here/v1 on cpu; the cache holds 1,024 tokens" in err


def test_a_stop_string_ends_the_text(run):
    _, whole, _ = run("generate", "import os\n", "--no-echo", *GREEDY)
    stop = whole[2:4]
    _, out, _ = run("generate", "import os\n", "--no-echo", "--stop", stop, *GREEDY)
    assert out.rstrip("\n") == whole[: whole.index(stop)]


def test_the_page_map_shows_what_samples_share(run):
    prompt = "def f():\n" + "    x = 1\n" * 30
    code, _, err = run("generate", prompt, "--n", "2", "--show-pages", "--max-tokens", "3", *SMALL)
    assert code == 0
    assert re.search(
        r"^Step 3 of 3, when most blocks were in use:\n2 sequences hold \d+ of 64", err
    )
    assert re.search(r"^ 0  .*2.*\.", err, re.MULTILINE)
    assert re.search(r"^ A  sample 0 +\d+ +\d+ +\d+  \S*\*", err, re.MULTILINE)
    assert re.search(r"^ B  sample 1 ", err, re.MULTILINE)
    assert max(map(len, err.splitlines())) <= 80


def test_a_tiny_pool_preempts_and_says_so(run):
    args = ["--num-blocks", "8", "--block-size", "4", "--max-tokens", "12", "--ignore-eos"]
    code, out, err = run("generate", "a = 1", "b = 2", "c = 3", "d = 4", *args)
    assert code == 0
    assert out.count("--- prompt") == 4
    assert re.search(r"^preempted +[1-9]\d* times, [1-9]\d* tokens recomputed$", err, re.MULTILINE)
    assert re.search(r"^blocks in use +8 of 8 at the peak, 4 tokens each$", err, re.MULTILINE)


def test_a_sample_that_fails_is_named_last(run, monkeypatch):
    def fail(self, results, rows):
        error = GenerationError("no token has a probability")
        return SampledTokens([0] * len(rows), {}, dict.fromkeys(range(len(rows)), error))

    monkeypatch.setattr("pagetile.engine.sampler.Sampler.collect", fail)
    code, _, err = run("generate", "x", *GREEDY)
    assert code == 2
    assert err.splitlines()[-1] == "pagetile: prompt 0: no token has a probability"


# --- plan -----------------------------------------------------------------------------------


def test_a_plan_from_a_config_alone(run, tmp_path):
    config = {
        "model_type": "gemma2",
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "sliding_window": 4096,
        "max_position_embeddings": 8192,
        "torch_dtype": "bfloat16",
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    code, out, err = run("plan", "--model", str(tmp_path), "--memory", "16GiB", "--mean-len", "300")
    assert (code, err) == (0, "")
    assert re.search(r"^13 sliding window +8 +4 +256 +4,096 +53,248$", out, re.MULTILINE)
    assert re.search(r"^13 full attention +8 +4 +256 +all +53,248$", out, re.MULTILINE)
    assert re.search(r"^all +106,496$", out, re.MULTILINE)
    assert "not known" in out
    assert "10,082 blocks of 16 tokens, 1.62 MiB each" in out
    assert re.search(r"^tokens +161,312$", out, re.MULTILINE)
    assert re.search(r"^sequences +19 of 8,192 tokens$", out, re.MULTILINE)
    assert re.search(r"^windows +at 8,192 tokens, 75% of", out, re.MULTILINE)
    # With q = 299/300: 1 / (1 - q**16) = 19.25 blocks, or 308.06 slots, for 300 tokens.
    assert re.search(r"^ *wasted +2\.5% +96\.3%$", out, re.MULTILINE)
    assert max(map(len, out.splitlines())) <= 80


def test_a_plan_is_for_the_memory_of_the_device_where_models_run(run, monkeypatch):
    free = {torch.device("cpu"): 10 << 30, torch.device("cuda"): 20 << 30}
    monkeypatch.setattr("pagetile.device.available_memory", free.__getitem__)
    for device, memory in free.items():
        monkeypatch.setattr("pagetile.device.default_device", lambda device=device: device)
        assert run("plan") == run("plan", "--memory", str(memory * 9 // 10))


@pytest.mark.parametrize(
    ("option", "alias", "name"),
    [("--dtype", "half", "float16"), ("--kv-cache-dtype", "fp8", "fp8_e4m3")],
)
def test_types_have_vllm_s_names_too(option, alias, name, run):
    plans = [run("plan", "--memory", "1GiB", option, each) for each in (alias, name)]
    assert [code for code, *_ in plans] == [0, 0]
    assert plans[0][1].replace("cache fp8\n", "cache fp8_e4m3\n") == plans[1][1]
    code, out, _ = run("generate", "import os", option, alias, *GREEDY)
    assert code == 0
    assert out == run("generate", "import os", option, name, *GREEDY)[1]


def test_a_plan_of_an_eight_bit_cache_counts_its_scales(run):
    tokens = {}
    for dtype in ("float32", "auto", "int8"):
        code, out, _ = run("plan", "--memory", "16GiB", "--kv-cache-dtype", dtype)
        assert code == 0
        [per_token] = re.findall(r"^\d+ full attention .* all +([\d,]+)$", out, re.MULTILINE)
        tokens[dtype] = int(per_token.replace(",", ""))
    config = json.loads((demo_path() / "config.json").read_text())
    heads = config["num_hidden_layers"] * config["num_key_value_heads"]
    assert tokens["float32"] == 2 * tokens["auto"]
    assert tokens["int8"] == tokens["auto"] // 2 + 8 * heads
    assert ", cache int8" in out


def test_a_plan_subtracts_the_weights(run):
    code, out, _ = run("plan", "--memory", "16GiB", "--lengths", "100,200", "--dtype", "float32")
    assert code == 0
    size = (demo_path() / "model.safetensors").stat().st_size * 2 / 2**20
    [weights] = re.findall(r"^weights +([\d.]+) MiB$", out, re.MULTILINE)
    assert float(weights) == pytest.approx(size, rel=0.02)
    assert "With 2 given lengths (150.0 tokens on average)" in out


# --- as a process ---------------------------------------------------------------------------


def test_a_process_with_a_pipe():
    with _start("generate", *GREEDY) as process:
        out, err = process.communicate(b"def add(a, b):\n", timeout=300)
    assert process.returncode == 0
    assert out.startswith(b"def add(a, b):")
    assert err.startswith(b"blocks in use ")


def test_a_reader_that_leaves():
    with _start("generate", "x = 1", "--max-tokens", "500", "--ignore-eos", *SMALL) as process:
        assert process.stdout.read(1) == b"x"
        process.stdout.close()
        assert process.wait(300) == 141
        assert process.stderr.read() == b"pagetile: stopped: standard output was closed\n"


def test_a_reader_that_leaves_a_picture_s_numbers(tmp_path):
    with _start("explain", "tiles", "--out", str(tmp_path / "tiles.png")) as process:
        process.stdout.close()
        assert process.wait(300) == 141
        assert process.stderr.read() == b"pagetile: stopped: standard output was closed\n"


def test_ctrl_c():
    with _start("generate", "x = 1", "--max-tokens", "1000", "--ignore-eos", *SMALL) as process:
        assert process.stdout.read(1) == b"x"
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=300)
    assert process.returncode == 130
    assert err == b"pagetile: interrupted\n"
    assert out.endswith(b"\n")


def test_an_output_without_room_is_reported_as_cut_short(run):
    code, _, err = run("generate", "x", *GREEDY, "--max-tokens", "40", "--max-model-len", "10")
    assert code == 0
    assert "cut short        1 by max_model_len=10" in err
    code, _, err = run("generate", "x", *GREEDY)
    assert code == 0
    assert "cut short" not in err
