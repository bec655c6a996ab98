"""From a call with packed sequences of 8-bit operands on a GPU to its launch, see `cuteflash.packed_planning`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from cuteflash.arguments import Fp8Options, PackedTensors, ScaleTensors, mask_of_window
from cuteflash.compile import compiled
from cuteflash.dispatch import choose
from cuteflash.fp8_planning import FAMILY, TORCH_DTYPES, check_family, columns_contiguous, operands_of, results
from cuteflash.packed_planning import SEVERAL, class_of_lengths, counters, is_empty, storage_of
from cuteflash.planning import Result, fwd_scalars, should_pack
from cuteflash.problem import FwdProblem, Scores, packs_block_scales
from cuteflash.strides import usable_strides
from cuteflash.validate import ALIGNMENT
from cuteflash.validate_fp8_packed import Fp8PackedInputs, check_fp8_packed

Launch = Callable[[Fp8PackedInputs], Result]


class Fp8PackedPlanner:
    """The launches of one forward operator on packed sequences of 8-bit operands.

    Args:
        has_lse: whether it returns the log-sum-exp, too.
    """

    def __init__(self, has_lse: bool) -> None:
        self.has_lse = has_lse

    def launch(self, inputs: Fp8PackedInputs, options: Fp8Options) -> Launch:
        """A checked launch for calls with the same sizes, strides and options; what it keeps holds no tensor.

        Raises:
            TypeError, ValueError, NotImplementedError: as `check_fp8_packed`, `check_family` and `choose` do.
        """
        check_fp8_packed(inputs, options)
        q, packed, has_lse = inputs.q, inputs.packed, self.has_lse
        target = check_family(q.device, options.family)
        (rows, heads, head_dim), head_dim_v = q.shape, inputs.head_dim_v(options)
        shapes, out_dtype = ((rows, heads, head_dim_v), (heads, rows)), TORCH_DTYPES[options.out_dtype]
        if is_empty(packed):
            return lambda inputs: results(inputs.q, shapes, out_dtype, has_lse=has_lse, fill=True)
        mask, left, right = mask_of_window(options.window_left, options.window_right, SEVERAL)
        operands, storage = operands_of(q, head_dim_v, options, inputs.v_mean), storage_of(packed)
        operands = dataclasses.replace(operands, has_block_scales=inputs.has_block_scales)
        problem = FwdProblem(operands, Scores(mask, softcap=options.softcap > 0), storage, has_lse)
        choice = choose(problem, target, FAMILY, class_of_lengths(packed, options))
        heads_per_kv = heads // inputs.k.shape[1]
        packs = options.pack_gqa
        if packs is None:
            packs = should_pack(-(-rows // packed.batch), heads_per_kv, choice.traits.tile_m)
            packs = packs and (packs_block_scales(heads_per_kv) or not inputs.has_block_scales)
        kernel = compiled(choice.kernel_cls, choice.traits, problem.packed(heads_per_kv) if packs else problem, target)
        scalars = fwd_scalars(options, (left, right), head_dim, q.device)
        restrides = [usable_strides(x.stride(), ALIGNMENT) for x in inputs[:3]]

        def launch(inputs: Fp8PackedInputs) -> Result:
            result = results(inputs.q, shapes, out_dtype, has_lse=has_lse, fill=storage.used_q)
            o, lse = result if has_lse else (result, None)
            q, k, v = (x.as_strided(x.shape, s) if s else x for x, s in zip(inputs[:3], restrides, strict=True))
            vectors = PackedTensors(*inputs.packed[3:], counters.of(o.device))
            scales = ScaleTensors(**inputs.descales, v_mean=columns_contiguous(inputs.v_mean))
            kernel(q, k, v, o, lse, *vectors, *scales, *scalars)
            return result

        return launch
