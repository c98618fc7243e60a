from __future__ import annotations

import re
import subprocess
import sys
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

from pagetile.analysis.page_story import page_story
from pagetile.analysis.roofline import machine_names
from pagetile.cli import main
from pagetile.cli.app import app


@pytest.fixture
def run(capsys, tmp_path, monkeypatch):
    """Runs the command line in an empty folder: (exit code, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)

    def call(*args: str) -> tuple[int, str, str]:
        code = main(args)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


@pytest.mark.parametrize("command", ["pages", "tiles", "io", "windows"])
def test_help_is_narrow_and_has_examples(command):
    result = CliRunner().invoke(app, ["explain", command, "--help"])
    assert result.exit_code == 0
    assert f"pagetile explain {command} " in result.stdout.split("Examples")[1]
    assert max(map(len, result.stdout.splitlines())) <= 80


def test_a_missing_command_prints_the_help(run):
    code, out, err = run("explain")
    assert (code, err) == (0, "")
    for command in ("pages", "tiles", "io", "windows"):
        assert re.search(rf"^│ {command} ", out, re.MULTILINE)


def test_help_names_every_machine():
    words = re.sub(r"[│\s]+", " ", CliRunner().invoke(app, ["explain", "io", "--help"]).stdout)
    for name in (*machine_names(), "here"):
        assert re.search(rf"[ :]{name}[,;.]", words), name


@pytest.mark.parametrize("command", ["pages", "tiles", "io", "windows"])
def test_each_draws_into_a_default_file_and_names_it(command, run, tmp_path):
    code, out, err = run("explain", command)
    assert (code, err) == (0, "")
    assert re.search(rf"^picture +{command}\.png$", out, re.MULTILINE)
    assert (tmp_path / f"{command}.png").read_bytes().startswith(b"\x89PNG")
    assert max(map(len, out.splitlines())) <= 80


def test_tiles_counts_by_hand(run, tmp_path):
    """300 queries are 5 tiles: 1 + 2 + 3 + 4 + 5 visits, the diagonal masked."""
    code, out, _ = run("explain", "tiles", "--query-len", "300", "--causal", "--out", "t.svg")
    assert code == 0
    assert re.search(r"^tiles +25: 10 full, 5 masked, 10 skipped$", out, re.MULTILINE)
    assert re.search(r"^scores +45,150 count, of 61,440 computed \(73\.5%\)$", out, re.MULTILINE)
    assert re.search(r"^K and V +940 rows", out, re.MULTILINE)
    assert re.search(r"^query tile 2 +rows 128 to 191 visit K/V tiles 0 to 2$", out, re.MULTILINE)
    assert (tmp_path / "t.svg").read_text().startswith("<?xml")


def test_io_says_where_tiles_stop_saving_bytes(run):
    args = ["--head-size", "128", "--tiles", "48,64,128", "--lengths", "64,8192"]
    code, out, _ = run("explain", "io", *args, "--machine", "h200")
    assert code == 0
    assert re.search(r"^tiles of 48 rows .* from 145$", out, re.MULTILINE)
    assert re.search(r"^tiles of 64 rows .* 1\.01 x .* never$", out, re.MULTILINE)
    assert re.search(r"^least time .* on NVIDIA H200 SXM$", out, re.MULTILINE)


def test_io_counts_groups_values_and_either_loop(run):
    """64 keys stay on chip while 1024 queries and their results pass: computed by hand."""
    sizes = ["--head-size", "192", "--v-head-size", "128", "--group", "8", "--outer", "kv"]
    code, out, _ = run("explain", "io", *sizes, "--tiles", "64", "--lengths", "64,1024")
    assert code == 0
    assert "8 query heads a KV head, head size 192 and 128 of values" in out
    once = 8 * (1024 * (192 + 128) * 2 + 16 * 1024 * ((192 + 2 * 128) * 2 + 4 * 4))
    assert re.search(rf"^tiles of 64 rows +{once / 1e6:.3g} MB", out, re.MULTILINE), out
    compulsory = 1024 * (8 * (192 + 128) * 2 + (192 + 128) * 2 + 8 * 4)
    assert re.search(rf"^compulsory +{compulsory / 1e6:.3g} MB", out, re.MULTILINE), out


def test_windows_counts_a_layer_of_swin_unetr(run):
    args = "--grid 48,48,48 --window 7,7,7 --num-heads 3 --head-size 16 --machine h200-measured"
    code, out, _ = run("explain", "windows", *args.split())
    assert code == 0
    for row in (
        "masked +127 of 343 windows \\(37%\\)",
        "padding +7,057 tokens, to 49 x 49 x 49",
        "mask +161 MB dense, 118 kB as region ids",
        "scores +484 MB in float32",
        "least time +31.3 µs on NVIDIA H200 SXM, as measured",
    ):
        assert re.search(f"^{row}$", out, re.MULTILINE), row


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ("tiles --tile 5", "--tile 5: expected 2 whole numbers"),
        ("tiles --tile 0,5", "--tile 0,5: expected 2 whole numbers of at least 1"),
        ("tiles --query-tile 9", "query tile 9: expected 0 to 4"),
        ("tiles --query-len 0", "query_len is 0"),
        ("tiles --query-len 100000", "too many to tell apart"),
        ("tiles --out a.pdf", "ends in .png or .svg"),
        ("tiles --out no/a.png", "there is no folder no"),
        ("io --machine h300", "--machine h300: expected one of here, h200,"),
        ("io --lengths 64,64", "lengths from 64 to 64"),
        ("io --lengths 64,4000000", "83,334 tiles, expected at most 16,384"),
        ("io --num-heads -1", "num_heads is -1"),
        ("io --tiles x", "--tiles x: expected some whole numbers"),
        ("io --dtype int8", "int8"),
        ("io --num-heads 0 --machine h200", "num_heads is 0"),
        ("io --group 3 --machine h200", "--num-heads 16: expected a multiple of --group 3"),
        ("io --group 0", "'--group': expected at least 1: see"),
        ("io --outer both", "both"),
        ("windows --head-size 0", "head_size is 0"),
        ("windows --num-images -1", "num_images is -1, expected at least 1"),
        ("windows --grid 14,14 --window 7,7,7", "differ in their number of axes"),
        ("windows --shift 7,7", "shifts from 0 to less than the window"),
        ("windows --grid 14 --window 7", "a grid of 1 axes: expected 2 or 3"),
        ("foo", "No such command 'foo'"),
    ],
)
def test_a_mistake_is_one_line_and_draws_nothing(args, message, run, tmp_path):
    code, out, err = run("explain", *args.split())
    assert (code, out) == (2, "")
    assert re.fullmatch(r"pagetile: .*\n", err)
    assert message in err
    assert list(tmp_path.iterdir()) == []


def test_without_matplotlib_the_extra_is_named(tmp_path):
    code = (
        "import sys; sys.modules['matplotlib'] = None;"
        "from pagetile.cli import main; sys.exit(main(['explain', 'tiles']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "pagetile: matplotlib is not installed: pip install 'pagetile[plots]', or in a checkout "
        "pip install -e '.[plots]'\n"
    )


def test_pages_tells_the_story_and_animates_it(run, tmp_path):
    code, out, _ = run("explain", "pages", "--animation", "life.svg")
    assert code == 0
    assert re.search(r"^ 6  C writes a token of its own", out, re.MULTILINE)
    assert "After step 6, which the picture shows:" in out
    assert "3 sequences hold 6 of 16 blocks, 3 shared" in out
    picture = ElementTree.fromstring((tmp_path / "life.svg").read_text())
    frames = [node for node in picture if node.get("class") == "step"]
    assert len(frames) == 10
    cells = [len([n for n in frame if n.tag.endswith("}rect")]) for frame in frames]
    assert min(cells) == 16 < max(cells)  # and a line below blocks that are written


def test_an_animation_is_an_svg(run):
    code, out, err = run("explain", "pages", "--animation", "life.png")
    assert (code, out) == (2, "")
    assert "an animation is an SVG" in err


def test_the_story_holds_and_frees_what_it_says():
    steps = page_story()
    held = [step.pages.num_held for step in steps]
    assert held[:6] == [0, 3, 4, 5, 5, 6]
    assert [len(step.pages.cached) for step in steps][6:] == [0, 1, 0, 0]
    assert steps[5].copy == (3, 5)
    assert steps[-1].pages.num_held == steps[-1].pages.num_blocks
