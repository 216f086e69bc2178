"""A detector that finds the same in each picture, in the form of ultralytics' ONNX files."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

#: Width and height of what it sees.
SIDE = 64


def write_detector(
    path: Path, found: Sequence[Sequence[float]], *, is_clean: bool = False
) -> Path:
    """Writes a network with these boxes: middle, width and height in its pixels, confidence.

    Each may have a confidence of every class. *is_clean*: they are corners, confidence and class.
    """
    output = np.array(found, np.float32)[None]
    output = output if is_clean else output.swapaxes(1, 2)
    value = numpy_helper.from_array(output, "boxes")
    node = helper.make_node("Constant", [], ["output0"], value=value)
    pictures = helper.make_tensor_value_info(
        "images", TensorProto.FLOAT, [1, 3, SIDE, SIDE]
    )
    boxes = helper.make_tensor_value_info("output0", TensorProto.FLOAT, output.shape)
    graph = helper.make_graph([node], "detector", [pictures], [boxes])
    opsets = [helper.make_opsetid("", 17)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(model.SerializeToString())
    onnx.checker.check_model(model)
    return path
