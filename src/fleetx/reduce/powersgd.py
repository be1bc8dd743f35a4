"""PowerSGD: send a gradient matrix as two thin factors, keep what they miss (Vogels et al. 2019, arXiv 1905.13727).

M = gradient + error                of each rank, its share of the mean
P = sum over ranks of M Q           Q is the right factor of the update before: one step of power iteration
P = an orthonormal basis of it
Q = sum over ranks of M' P
the gradient of all ranks is P Q';  each keeps error = M - P (its own M' P)'
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor

from ..engine.bucket import wide_type
from ..engine.slots import Site, Step
from ..errors import CheckpointError
from .compressor import Compressor, Piece, sum_together

SEED = 1905_13727
"""Seed of the first right factors: equal on all ranks, and apart from the user's random numbers."""


def matrix_shape(param: Tensor) -> tuple[int, int]:
    """Return rows and columns: the dimension outermost in memory (as a rule the first) against all others."""
    if param.dim() < 2 or param.numel() == 0:
        return 1, param.numel()
    is_dense = torch.ops.aten.is_non_overlapping_and_dense(param)
    outermost = max(range(param.dim()), key=lambda d: (param.shape[d] > 1, param.stride(d), -d)) if is_dense else 0
    rows = param.shape[outermost]
    return rows, param.numel() // rows


def is_smaller(matrix: tuple[int, int], *, rank: int, min_compression: float) -> bool:
    """Return whether the factors of such a matrix have fewer numbers than it has, by more than `min_compression` times."""
    rows, columns = matrix
    return (rows + columns) * rank * min_compression < rows * columns


def orthonormal(matrix: Tensor) -> Tensor:
    """Return an orthonormal basis of the columns' span, by Householder's method: it also replaces zero or dependent columns."""
    basis: Tensor = torch.linalg.qr(matrix).Q
    return basis


def unit_columns(matrix: Tensor) -> Tensor:
    """Scale columns to length 1 (a zero column stays 0), so that a product with them stays in the range of its type."""
    norms = torch.linalg.vector_norm(matrix, dim=0, keepdim=True)
    return matrix / torch.where(norms > 0, norms, 1.0)


def _are_finite(tensors: Sequence[Tensor]) -> Tensor:
    return torch.stack([tensor.isfinite().all() for tensor in tensors]).all()


@final
class LowRankReduce(Compressor):
    """Send each matrix as two factors of low rank; keep per rank what they miss."""

    name, threshold = "powersgd", "min_compression"

    def __init__(self, site: Site, *, rank: int, dense_updates: int, min_compression: float, two_level: bool) -> None:
        super().__init__(site, two_level=two_level)
        self._dense_updates = dense_updates
        self._rank, self._min_compression = rank, min_compression
        self._errors: list[Tensor] = []
        """What the factors missed: one row per tensor."""
        self._rights: list[Tensor] = []
        """Right factor Q of each tensor, from the update before."""
        self._matrices: list[Tensor] = []
        """Matrix M of each tensor during an update; empty between updates."""
        self._begun = False

    def _is_dense(self, index: int) -> bool:
        return index <= self._dense_updates

    def _takes(self, param: Tensor) -> bool:
        return is_smaller(matrix_shape(param), rank=self._rank, min_compression=self._min_compression)

    def _numbers_sent(self) -> int:
        return sum(sum(matrix_shape(piece.view)) * self._rank_of(piece) for piece in self._pieces)

    def _residuals(self) -> list[Tensor]:
        return self._errors

    def _rank_of(self, piece: Piece) -> int:
        return min(self._rank, *matrix_shape(piece.view))

    # --- one update -----------------------------------------------------------------------------------------------

    def _prepare(self, step: Step) -> list[Tensor]:
        if not self._rights:
            self._make_room()
        self._matrices = []
        for piece, error in zip(self._pieces, self._errors, strict=True):
            # In the gradient's own memory: the error must not change before all ranks are known to be finite.
            matrix = piece.grad.add_(error) if piece.grad.dtype == error.dtype else piece.grad.to(error.dtype).add_(error)
            self._matrices.append(matrix.view(matrix_shape(piece.view)))
        return [matrix @ right for matrix, right in zip(self._matrices, self._rights, strict=True)]

    def _exchange(self, step: Step, sums: Sequence[Tensor]) -> bool:
        if not bool(_are_finite(sums)):
            return False  # finite entries whose products are not; the sums are equal on all ranks, so is the answer
        self._send_factors(sums, nonfinite=None)
        return True

    def _exchange_undecided(self, step: Step, sums: Sequence[Tensor], nonfinite: Tensor) -> Tensor:
        nonfinite = nonfinite | ~_are_finite(sums)
        self._send_factors([torch.where(nonfinite, 0.0, left) for left in sums], nonfinite=nonfinite)
        return nonfinite

    def _send_factors(self, sums: Sequence[Tensor], *, nonfinite: Tensor | None) -> None:
        """Put the product of both factors in place of the gradients. Where `nonfinite`, keep errors and right factors."""
        lefts = [orthonormal(left) for left in sums]
        own = [matrix.T @ left for matrix, left in zip(self._matrices, lefts, strict=True)]
        rights = [mine.clone() for mine in own]
        sum_together(rights, self._among)
        for piece, matrix, left, mine, right, error in zip(
            self._pieces, self._matrices, lefts, own, rights, self._errors, strict=True
        ):
            if nonfinite is None:
                torch.addmm(matrix, left, mine.T, alpha=-1, out=error.view(matrix.shape))
            else:
                missed = torch.addmm(matrix, left, mine.T, alpha=-1)
                torch.where(nonfinite, error, missed.view(-1), out=error)
            gradient = piece.grad.view(matrix.shape)
            if gradient.dtype == left.dtype:
                torch.mm(left, right.T, out=gradient)
            else:
                gradient.copy_(left @ right.T)
        renewed = [unit_columns(right) for right in rights]
        if nonfinite is not None:
            pairs = zip(self._rights, renewed, strict=True)
            renewed = [torch.where(nonfinite, before, right) for before, right in pairs]
        self._rights = renewed
        self._matrices, self._begun = [], True

    def _make_room(self) -> None:
        random = torch.Generator().manual_seed(SEED)
        self._errors, self._rights = [], []
        for piece in self._pieces:
            wide, device = wide_type(piece.grad.dtype), piece.grad.device
            self._errors.append(torch.zeros(piece.grad.numel(), dtype=wide, device=device))
            columns = matrix_shape(piece.view)[1]
            right = torch.randn(columns, self._rank_of(piece), generator=random, dtype=torch.float32)
            self._rights.append(unit_columns(right.to(device, wide)))

    # --- resume ---------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        rights = {piece.name: right for piece, right in zip(self._pieces, self._rights, strict=True)} if self._begun else {}
        errors = self._by_name(self._errors) if self._begun else {}
        return {"kind": self.name, "share_of_rank": self._share_of_rank, "rights": rights, "shares": {"error": errors}}

    def check_state_dict(self, state: Mapping[str, Any], index: int) -> None:
        super().check_state_dict(state, index)
        for piece in self._pieces:
            right, shape = state["rights"].get(piece.name), (matrix_shape(piece.view)[1], self._rank_of(piece))
            if right is not None and tuple(right.shape) != shape:
                raise CheckpointError(
                    f"the checkpoint's factor of `{piece.name}` is {right.shape[0]} x {right.shape[1]}, and this run's "
                    f'{shape[0]} x {shape[1]}. Resume with the old powersgd_configs["rank"], and the old memory format.'
                )

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.forget()
        self._begun = bool(state["rights"])
        if not self._begun:
            return
        self._make_room()
        self._put(self._errors, state["shares"]["error"], self._share_factor(state))
        for piece, right in zip(self._pieces, self._rights, strict=True):
            right.copy_(state["rights"][piece.name])

    def forget(self) -> None:
        self._changes += 1
        self._errors, self._rights, self._begun = [], [], False
