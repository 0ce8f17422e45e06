"""Compiles every Triton program for a GPU, without one; prints a line for each.

Triton brings its own assembler. A process of its own, because the tests beside it have bound the
programs to the interpreter.
"""

import re
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from stratagem.worker.kernels import triton as triton_launch
from stratagem.worker.kernels import triton as triton_programs

assert not torch.cuda.is_initialized()

TARGETS = [GPUTarget("cuda", 80, 32), GPUTarget("cuda", 90, 32)]
BLOCK = {"BLOCK": triton_launch.BLOCK}
TREE = BLOCK | {"NUM_LEVELS": triton_launch.NUM_LEVELS}
QUANTISE = "*fp32 *u8 *fp32 fp32 fp32 i32 i64"
PROGRAMS: list[tuple[Any, str, dict[str, int]]] = [
    (triton_programs.sign_program, "*fp32 i32 i64", BLOCK),
    *[
        (triton_programs.quantise_program, QUANTISE, BLOCK | {"IS_STOCHASTIC": a, "HAS_REST": b})
        for a, b in ((False, False), (False, True), (True, False))
    ],
    (triton_programs.unpack_program, "*u8 *fp32 fp32 i64", BLOCK | {"ADDS": False}),
    (triton_programs.unpack_program, "*u8 *fp32 fp32 i32", BLOCK | {"ADDS": True}),
    (triton_programs.magnitude_program, "*fp32 *fp64 *fp32 fp32 i32", TREE),
    (triton_programs.magnitude_program, "*fp32 *fp64 *fp32 fp32 i64", TREE),
    (triton_programs.dot_program, "*fp32 *fp32 *fp64 i64", TREE),
    (triton_programs.tree_program, "*fp64 *fp64 i32", TREE),
    (triton_programs.sketch_program, "*fp32 *fp32 i32 i32 i32 i32", BLOCK),
    (triton_programs.sketch_program, "*fp32 *fp32 i32 i64 i32 i32", BLOCK),
    (triton_programs.unsketch_program, "*fp32 *fp32 i32 fp32 i64 i32", BLOCK),
]

for target in TARGETS:
    for program, types, constants in PROGRAMS:
        signature = dict(zip(program.arg_names, types.split(), strict=False))
        signature |= dict.fromkeys(constants, "constexpr")
        source = ASTSource(fn=program, signature=signature, constexprs=constants)
        compiled = triton.compile(source, target, {"enable_fp_fusion": False})
        text = compiled.asm["ptx"]
        found = sorted(set(re.findall(r"\b(?:atom|fma|red)\.[\w.]+", text)))
        print(program.__name__, target.arch, len(compiled.asm["cubin"]), *found, flush=True)
