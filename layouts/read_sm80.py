"""The scene of an sm80 row: cp.async, ldmatrix, mma.sync, read from the kernel's own layouts, copies and fragments."""

from __future__ import annotations

from typing import Any, Final, Literal

from cuteflash.problem import DTYPE_BYTES, FwdProblem

from .ampere import WARPS, AmpereSteps
from .parts import part_tile, store_part
from .read import Frame, Placed, global_tile, no_launch, products, shared_tile, smem_start
from .scene import Fragment, Role, Step, Tile
from .softmax_steps import EVERY, SoftmaxSteps


class ReaderSm80:
    """Reads one sm80 kernel; make and use it inside `layouts.dsl.context`."""

    loop: Final = "key blocks"

    def __init__(self, kernel: Any) -> None:
        self.kernel, self.traits = kernel, kernel.traits
        self.problem: FwdProblem = kernel.problem
        t = self.traits
        self.frame = Frame({"m": t.tile_m, "n": t.tile_n, "d": t.head_dim, "e": t.head_dim_v}, 1, 0, t.num_threads)
        self.registers = self.make_registers()
        self.of = self.operands()
        self.draw = AmpereSteps(self.frame, self.problem.operands.product_dtype, EVERY)

    def make_registers(self) -> Any:
        """The kernel's fragments, of its first thread."""
        from cutlass import Int32

        from cuteflash.kernels.sm80.fwd_mma import make_fragments

        return make_fragments(self.kernel, self.kernel.make_tiles(smem_start()), no_launch(1), Int32(0))

    def operands(self) -> dict[str, Placed]:
        """Those of both products, by tensor."""
        return products(self.frame, self.kernel)

    def roles(self) -> tuple[Role, ...]:
        """All warps do the same."""
        rows = self.traits.tile_m // self.traits.num_warps
        return (Role("warps", 0, self.traits.num_threads, f"loads, products, softmax, stores; {rows} query rows each"),)

    def tiles(self) -> tuple[Tile, ...]:
        """Global tiles, then shared memory."""
        operands, kernel, plan = self.problem.operands, self.kernel, self.traits.smem_plan
        k_bytes, v_bytes = (DTYPE_BYTES[dtype] for dtype in (operands.k_dtype, operands.v_dtype))
        return (
            global_tile(self.frame, "Q", operands.head_dim, "A block's queries of one head."),
            global_tile(self.frame, "K", operands.head_dim, "One block of keys.", k_bytes),
            global_tile(self.frame, "V", operands.head_dim_v, "One block of values.", v_bytes),
            global_tile(self.frame, "O", operands.head_dim_v, "The block's output."),
            *((part_tile(self.frame),) if self.problem.is_split else ()),
            shared_tile("Q", kernel.smem_layout_q(), plan["q"].start, False, ""),
            self.loaded_tile("K", kernel.smem_layout_k(), plan["k"].start),
            self.loaded_tile("V", kernel.smem_layout_v(), plan["v"].start),
            shared_tile(
                "O", kernel.smem_layout_o(), plan["o"].start, False, "Overlaps Q, V and K, which are no longer needed."
            ),
        )

    def loaded_tile(self, tensor: str, layout: Any, start: int) -> Tile:
        """K or V in shared memory."""
        return shared_tile(tensor, layout, start, False, "")

    def fragments(self) -> tuple[Fragment, ...]:
        """Operands and accumulators of both products."""
        held = self.registers
        blocks = 1 + self.traits.ahead
        live = f"{blocks} of its k-blocks {'are' if blocks > 1 else 'is'} live at a time."
        copies = "Every warp needs all of it: each element is in the registers of one thread of every warp."
        q_note = "Stays for the whole tile." if self.traits.q_in_regs else live
        p_note = "The S accumulators, rounded: already in the threads that need them for A of the next product."
        make = self.frame.fragment
        return (
            make("rQ", self.of["Q"], held.rQ, q_note),
            make("rK", self.of["K"], self.operand_registers("K"), f"{copies} {live}"),
            make("acc_S", self.of["S"], held.acc_S, "Four neighbouring lanes hold a row together."),
            self._p_fragment(p_note),
            make("rV", self.of["V"], self.operand_registers("V"), f"{copies} {live}"),
            make("acc_O", self.of["O"], held.acc_O, "Stays for the whole tile."),
        )

    def operand_registers(self, tensor: Literal["K", "V"]) -> Any:
        """Those of an operand that comes with every key block."""
        return self.registers.rK if tensor == "K" else self.registers.rVt

    def _p_fragment(self, note: str) -> Fragment:
        from cutlass import cute

        from cuteflash.core.views import acc_as_operand_a

        rounded = cute.make_rmem_tensor_like(self.registers.acc_S, self.kernel.dtype)
        return self.frame.fragment("rP", self.of["P"], acc_as_operand_a(rounded), note)

    def steps(self) -> tuple[Step, ...]:
        """In the order in which data passes through a tile."""
        scores = (self._load("Q"), self._load("K"), *self.bring_q(), self.fetch("K", self.kernel.copy_k()))
        values = (self._load("V"), self.fetch("V", self.kernel.copy_v()))
        qk, *softmax, pv = self._block()
        store = self.draw.store("O", self.kernel.store_copy(self.frame.shape("O")[1]))
        part = (self.store_part(),) if self.problem.is_split else ()
        return (*scores, qk, *softmax, *values, pv, self.stage(), *store, *part)

    def _load(self, tensor: str) -> Step:
        """Global to shared memory: with one stage K and V load in turn, with more whole blocks load ahead."""
        stages = self.traits.kv_stage
        note = ""
        if tensor != "Q" and stages > 1:
            note = f"{stages - 1} block{'s' if stages > 2 else ''} ahead of the products. "
        elif tensor != "Q" and not self.traits.eager_loads:
            note = "At the start of a step, which waits for K and V. "
        elif tensor != "Q":
            note = f"While the {'PV product of the block before' if tensor == 'K' else 'QK product'} runs. "
        return self.load(tensor, note)

    def load(self, tensor: str, note: str) -> Step:
        """Global to shared memory, by the kernel's copy."""
        copy = self.kernel.load_copy(self.frame.shape(tensor)[1])
        return self.draw.load(tensor, copy, note, tensor == "Q", self.traits.async_copy)

    def bring_q(self) -> tuple[Step, ...]:
        """Q from shared memory to registers."""
        return (self.fetch("Q", self.kernel.copy_q(), once=self.traits.q_in_regs),)

    def fetch(self, tensor: str, copy: Any, once: bool = False) -> Step:
        """An operand's fragments from shared memory, once a tile or with every key block."""
        transposed = tensor == "V"
        why = "Transposed on the way: the product's k extent runs over V's rows."
        return self.draw.fetch(f"r{tensor}", tensor, copy, (transposed, transposed), once, why)

    def stage(self) -> Step:
        """O from its accumulators to shared memory."""
        rounded = "Divided by the row sums and rounded; two neighbouring columns at a time."
        return self.draw.stage("O", self.kernel.copy_o(), "acc_O", rounded)

    def store_part(self) -> Step:
        """A part of O, of a block's share of the keys, to its slot."""
        return store_part(self.frame, self.of["O"])

    def _block(self) -> tuple[Step, ...]:
        """The steps of one key block."""
        softmax, of = SoftmaxSteps(self.frame, self.of, self.problem, WARPS), self.of
        return (
            self.draw.product("mma_qk", "S = Q K^T", (of["Q"], "rQ"), (of["K"], "rK"), (of["S"], "acc_S")),
            softmax.moving(fused=self.traits.fused_softmax),
            softmax.convert(),
            softmax.rescale("Before the PV product."),
            self.draw.product("mma_pv", "O += P V", (of["P"], "rP"), (of["V"], "rV"), (of["O"], "acc_O")),
        )
