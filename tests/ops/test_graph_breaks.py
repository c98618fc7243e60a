"""Calls that torch.compile cannot include, in a process where no kernel has run yet."""

import subprocess
import sys

CALLS = {
    "plan": """
cache = torch.randn(10, 16, 2, 64)
batch = pagetile.PagedBatch.of([[3, 8], [5]], [30, 7])
x = torch.randn(2, 8, 64)
plan = pagetile.plan_paged_attention(x, cache, cache, batch)
call = lambda x: pagetile.paged_attention(x, cache, cache, batch, plan=plan).out + 1
""",
    "merge_states": """
lses, x = torch.randn(3, 5, 4), torch.randn(3, 5, 4, 64)
call = lambda x: pagetile.merge_states(x, lses, impl="cpu").out + 1
""",
    "attention_scores": """
x = torch.randn(2, 4, 49, 16)
call = lambda x: pagetile.attention_scores(x, x, impl="cpu") + 1
""",
    "copy_blocks": """
def call(x):
    cache = x * 2
    pagetile.copy_blocks([cache], [(0, 1)])
    return cache + 1
x = torch.randn(4, 16, 2, 8)
""",
}


def test_the_graph_breaks_at_calls_that_no_compiler_can_take():
    compared = "assert torch.compile(call, backend='eager')(x).equal(call(x))\n"
    program = "import torch, pagetile\n" + "".join(call + compared for call in CALLS.values())
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
