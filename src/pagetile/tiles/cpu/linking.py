"""Compile helpers of kernels only as part of the kernels, which halves compile time.

Numba optimises every function with its callees and generates machine code at every level of calls:
a helper five levels down is optimised six times, five of them for code that never runs. Here a
helper is kept as unoptimised LLVM code and linked into its callers; LLVM optimises all of it once,
when the entry is compiled. An attention kernel takes 17 seconds of a core instead of 35 (AVX2).

This overrides three private methods of Numba. If a version of Numba lacks one of them, ``LINKED``
is empty, and helpers are compiled as usual.
"""

from __future__ import annotations

from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import CompilerBase, DefaultPassBuilder
from numba.core.compiler_machinery import PassManager, register_pass
from numba.core.typed_passes import NativeLowering

_OVERRIDDEN = ("_optimize_functions", "_optimize_final_module", "_finalize_final_module")


class LinkedLibrary(JITCodeLibrary):
    """A function's code as LLVM's intermediate representation, for its callers to link."""

    @property
    def codegen(self):
        """The target's code generator, for a function without machine code."""
        return _WithoutEnvironment(self._codegen)

    def _optimize_functions(self, ll_module):
        ll_module.data_layout = self._codegen._data_layout

    def _optimize_final_module(self):
        pass

    def _finalize_final_module(self):
        self._finalize_dynamic_globals()
        self._finalized = True


class _WithoutEnvironment:
    """A code generator that sets no environment, which would need an address in machine code."""

    def __init__(self, codegen):
        self._codegen = codegen

    def __getattr__(self, name):
        return getattr(self._codegen, name)

    def set_env(self, env_name, env):
        """Do nothing: only calls from Python and exceptions with arguments read it."""


@register_pass(mutates_CFG=True, analysis_only=False)
class _LinkedLowering(NativeLowering):
    _name = "pagetile_linked_lowering"

    def run_pass(self, state):
        state.library = LinkedLibrary(state.targetctx.codegen(), state.func_id.func_qualname)
        return super().run_pass(state)


class _LinkedCompiler(CompilerBase):
    """Numba's pipeline, with ``LinkedLibrary``."""

    def define_pipelines(self):
        pipeline = PassManager("pagetile_linked")
        for step, text in DefaultPassBuilder.define_nopython_pipeline(self.state).passes:
            pipeline.add_pass(_LinkedLowering if step is NativeLowering else step, text)
        pipeline.finalize()
        return [pipeline]


_HAS_ALL = all(
    hasattr(JITCodeLibrary, name) for name in (*_OVERRIDDEN, "_finalize_dynamic_globals", "codegen")
)

LINKED = {"pipeline_class": _LinkedCompiler} if _HAS_ALL else {}
"""Options of ``njit`` for functions that are called from compiled code only."""
