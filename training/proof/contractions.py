"""Rules of products of tensors and of operations on matrices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from matex_data.training.proof.axes import Independent, PerSample, State, axis_size
from matex_data.training.proof.rules import Node, rule, samples, unaligned
from matex_data.training.proof.sizes import ONE, Size

PAIRS = "compares rows with each other"


@rule("MatMul")
def matrix_product(node: Node) -> list[State]:
    """Return the dependence of a product of two matrices."""
    return _product(node, node.op.get_attr("transpose_a"), node.op.get_attr("transpose_b"))


@rule("BatchMatMul", "BatchMatMulV2", "BatchMatMulV3")
def batch_product(node: Node) -> list[State]:
    """Return the dependence of products of matrices, along broadcast axes."""
    return _product(node, node.op.get_attr("adj_x"), node.op.get_attr("adj_y"))


def _product(node: Node, transpose_first: bool, transpose_second: bool) -> list[State]:
    """Return the dependence of ``[..., m, k] @ [..., k, n]``, by the rules of ``einsum``."""
    if not samples(node):
        return [node.independent()]
    terms, ranks = [], []
    for state, names in zip(node.inputs, ("km" if transpose_first else "mk", "nk" if transpose_second else "kn"),
                            strict=True):  # fmt: skip
        shape = state.shape if isinstance(state, Independent | PerSample) else None
        if shape is None or len(shape) < 2:
            return node.mixed("multiplies matrices of unknown rank")
        ranks.append(len(shape) - 2)
        terms.append([*(f"batch {i}" for i in reversed(range(len(shape) - 2))), *names])
    out = [*(f"batch {i}" for i in reversed(range(max(ranks)))), "m", "n"]
    return contracted(node, terms, out)


@rule("Einsum", "XlaEinsum")
def einsum(node: Node) -> list[State]:
    """Return the dependence of a sum of products over named axes."""
    if not samples(node):
        return [node.independent()]
    left, _, right = node.attribute("equation").replace(" ", "").partition("->")
    shapes = [s.shape for s in node.inputs if isinstance(s, Independent | PerSample) and s.shape is not None]
    equations = left.split(",")
    if len(shapes) < len(node.inputs) or "->" not in node.attribute("equation"):
        return node.mixed("multiplies tensors of unknown rank")
    counts = [len(shape) - len(text.replace("...", "")) for text, shape in zip(equations, shapes, strict=True)]
    dots = max([n for n, text in zip(counts, equations, strict=True) if "..." in text], default=0)
    terms = [_names(text, n) for text, n in zip(equations, counts, strict=True)]
    return contracted(node, terms, _names(right, dots))


def _names(text: str, dots: int) -> list[str]:
    """Return the names of axes in a term of an equation; those of an ellipsis are counted from the right."""
    before, ellipsis, after = text.partition("...")
    return [*before, *(f"batch {i}" for i in reversed(range(dots)) if ellipsis), *after]


def contracted(node: Node, terms: Sequence[Sequence[str]], out: Sequence[str]) -> list[State]:
    """Return the dependence of a sum of products.

    The samples have to be along the axis of one name, which every per-sample input has once, and the result as well.
    Another input may have an axis of that name only if it is broadcast along it.

    Parameters
    ----------
    terms : names of the axes of each input.
    out : names of the axes of the result; the sum runs over all others.
    """
    names: set[str] = set()
    sizes: dict[str, Size | None] = {}
    for state, term in zip(node.inputs, terms, strict=True):
        assert isinstance(state, Independent | PerSample)
        for name, size in zip(term, state.shape or (), strict=True):
            if size != ONE or name not in sizes:
                sizes[name] = size if sizes.get(name, ONE) in (ONE, size) else None
        if isinstance(state, PerSample):
            names.add(term[state.axis])
            if term.count(term[state.axis]) > 1:
                return node.mixed("takes a diagonal that runs over rows")
    rows = samples(node)
    if len(names) > 1:
        return node.mixed(PAIRS)
    (name,) = names
    if out.count(name) != 1:
        return node.mixed("sums over rows")
    if len({(state.before, state.after) for state in rows}) > 1:
        return unaligned(node)
    for state, term in zip(node.inputs, terms, strict=True):
        if not isinstance(state, Independent) or name not in term:
            continue
        if not name.startswith("batch") or (state.shape or ())[term.index(name)] != ONE:
            return node.mixed("combines rows with a tensor that has a fixed number of rows")
    axis = out.index(name)
    known = [axis_size(rows[0]) if i == axis else sizes.get(label) for i, label in enumerate(out)]
    shape = tuple(node.new_axis(i) if size is None else size for i, size in enumerate(known))
    return [PerSample(axis, shape, rows[0].before, rows[0].after)]


MATRICES = (
    "BatchMatrixBandPart", "Cholesky", "CholeskyGrad", "MatrixBandPart", "MatrixDeterminant",
    "MatrixDiagPartV2", "MatrixDiagPartV3", "MatrixDiagV2", "MatrixDiagV3", "MatrixExponential",
    "MatrixInverse", "MatrixLogarithm", "MatrixSetDiagV2", "MatrixSetDiagV3", "MatrixSolve",
    "MatrixSquareRoot", "MatrixTriangularSolve", "Qr", "SelfAdjointEigV2", "Svd", "LogMatrixDeterminant",
    "Eig", "Lu",
)  # fmt: skip


@rule(*MATRICES)
def on_matrices(node: Node) -> list[State]:
    """Return the dependence of what is computed for each matrix, which the last two axes hold."""
    axes = 1 if node.op.type.startswith(("MatrixDiagV", "BatchMatrixDiag")) else 2
    return _on_last_axes(node, axes)


FOURIER = {1: ("FFT", "IFFT", "RFFT", "IRFFT"), 2: ("FFT2D", "IFFT2D", "RFFT2D", "IRFFT2D"),
           3: ("FFT3D", "IFFT3D", "RFFT3D", "IRFFT3D")}  # fmt: skip


@rule(*FOURIER[1], *FOURIER[2], *FOURIER[3])
def fourier(node: Node) -> list[State]:
    """Return the dependence of a Fourier transform along the last axes."""
    return _on_last_axes(node, next(n for n, types in FOURIER.items() if node.op.type in types))


def _on_last_axes(node: Node, count: int) -> list[State]:
    """Return the dependence of what is computed from the last axes, for each element of the others."""
    rows = samples(node)
    if not rows:
        return [node.independent(i) for i in range(len(node.op.outputs))]
    first = node.inputs[0]
    if not isinstance(first, PerSample) or first.axis >= len(first.shape) - count:
        return node.mixed("combines rows")
    if any((s.axis, s.before, s.after) != (first.axis, first.before, first.after) for s in rows):
        return unaligned(node)
    if "SetDiag" not in node.op.type and any(len(s.shape) != len(first.shape) for s in rows):
        return unaligned(node)
    for state in node.inputs[1:]:
        scalar = isinstance(state, Independent) and state.shape is not None and len(state.shape) <= 1
        if not isinstance(state, PerSample) and not scalar:
            return node.mixed("combines rows with a table")
    ranks = [tensor.shape.rank for tensor in node.op.outputs]
    if any(rank is None or rank <= first.axis for rank in ranks):
        return node.mixed("has a result of unknown rank")
    return [
        replace(first, shape=tuple(axis_size(first) if axis == first.axis else node.new_axis(axis, i)
                                   for axis in range(rank)))
        for i, rank in enumerate(ranks)
    ]  # fmt: skip
