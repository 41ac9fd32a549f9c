"""Rules of operations on images and sequences: the first axis counts them, and none is combined with another."""

from __future__ import annotations

from dataclasses import replace

from matex_data.training.proof.axes import Independent, PerSample, State
from matex_data.training.proof.rules import Node, rule, samples
from matex_data.training.proof.sizes import ONE, Size, product

IMAGES = (
    "AdjustContrastv2", "AdjustHue", "AdjustSaturation", "AvgPool", "AvgPool3D", "Conv2D", "Conv3D",
    "DepthToSpace", "DepthwiseConv2dNative", "Dilation2D", "ExtractImagePatches", "ExtractVolumePatches",
    "HSVToRGB", "LRN", "MaxPool", "MaxPool3D", "RGBToHSV", "ResizeArea", "ResizeBicubic", "ResizeBilinear",
    "ResizeNearestNeighbor", "ScaleAndTranslate", "SpaceToDepth",
)  # fmt: skip
ANY_RANK = ("AdjustContrastv2", "AdjustHue", "AdjustSaturation", "HSVToRGB", "RGBToHSV")
"""Operations that compute each image from itself, which the last three axes hold, or the last one alone."""


@rule(*IMAGES)
def on_images(node: Node) -> list[State]:
    """Return the dependence of what is computed for each image; filters and sizes have to be independent of them."""
    x = node.inputs[0]
    if not samples(node):
        return [node.independent(i) for i in range(len(node.op.outputs))]
    if samples(node) != [x] or not isinstance(x, PerSample):
        return node.mixed("has a filter or a parameter that depends on samples")
    if x.axis or len(x.shape) < (4 if node.op.type in ANY_RANK else 1) or _moves_over_images(node):
        return node.mixed("combines rows: its windows run over the samples")
    return [_first_axis(node, x)]


def _first_axis(node: Node, x: PerSample) -> PerSample:
    return replace(x, shape=(x.shape[0], *(node.new_axis(i) for i in range(1, len(node.op.outputs[0].shape)))))


def _moves_over_images(node: Node) -> bool:
    """Return whether windows have more than one image, or leave some out, or the first axis counts no images."""
    if "data_format" in node.op.node_def.attr and not node.attribute("data_format").startswith("N"):
        return True
    names = {name for name in ("ksize", "ksizes", "strides", "dilations", "rates") if name in node.op.node_def.attr}
    first = [next(iter(node.op.get_attr(name) or [1])) for name in names]
    return any(size != 1 for size in first)


@rule("Conv2DBackpropInput", "Conv3DBackpropInputV2", "DepthwiseConv2dNativeBackpropInput", sizes=(0,))
def transposed_convolution(node: Node) -> list[State]:
    """Return the dependence of a transposed convolution: sizes of the result, filter, images."""
    sizes, kernel, x = node.inputs
    if not samples(node) and isinstance(sizes, Independent):
        return [node.independent()]
    if not isinstance(x, PerSample) or x.axis or not isinstance(kernel, Independent) or _moves_over_images(node):
        return node.mixed("combines rows, or has a filter that depends on samples")
    values = node.values(0)
    if isinstance(sizes, PerSample) or values is None or values[0] != x.shape[0] or _rows_in(values[1:]):
        return node.mixed("has a size that is not known")
    return [_first_axis(node, x)]


def _rows_in(values: tuple[Size | None, ...]) -> bool:
    return any(value is None or value.has_rows for value in values)


@rule("ImageProjectiveTransformV3")
def transform_images(node: Node) -> list[State]:
    """Return the dependence of images that are each transformed, by one matrix for all or one for each."""
    x, matrices, *others = node.inputs
    if not samples(node):
        return [node.independent()]
    if not isinstance(x, PerSample) or x.axis or any(isinstance(state, PerSample) for state in others):
        return node.mixed("combines rows")
    own = isinstance(matrices, PerSample) and (matrices.axis, matrices.before, matrices.after) == (0, x.before, x.after)
    one = isinstance(matrices, Independent) and matrices.shape is not None and matrices.shape[0] == ONE
    return [_first_axis(node, x)] if own or one else node.mixed("transforms images by their position in the batch")


@rule("SpaceToBatchND")
def space_to_batch(node: Node) -> list[State]:
    """Return the dependence of images that are cut into blocks: image ``i`` becomes ``block * rows + i``."""
    x, blocks = node.inputs[0], node.integers(1)
    if not samples(node):
        return [node.independent()]
    if not isinstance(x, PerSample) or x.axis or blocks is None or len(samples(node)) > 1:
        return node.mixed("combines rows")
    count = product(Size(n) for n in blocks)
    out = _first_axis(node, x)
    return [replace(out, before=count * x.before, shape=(count * x.shape[0], *out.shape[1:]))]


@rule("BatchToSpaceND")
def batch_to_space(node: Node) -> list[State]:
    """Return the dependence of images that blocks are put together to."""
    x, blocks = node.inputs[0], node.integers(1)
    if not samples(node):
        return [node.independent()]
    if not isinstance(x, PerSample) or x.axis or blocks is None or len(samples(node)) > 1:
        return node.mixed("combines rows")
    count = product(Size(n) for n in blocks)
    before, size = x.before / count, x.shape[0] / count
    if before is None or size is None:
        return node.mixed("combines rows")
    out = _first_axis(node, x)
    return [replace(out, before=before, shape=(size, *out.shape[1:]))]
