"""The embedded backend: how much memory a run takes, which the graph's numbers alone do not tell."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from speceyes.engines.onnxruntime import MEMORY_REUSE, OnnxRuntimeEngine

MEGABYTE = 1 << 20
SIZE = 4 * MEGABYTE
WIDEST = 6

GROWTH = """
import sys
from pathlib import Path
from speceyes.engines.onnxruntime import MEMORY_REUSE, OnnxRuntimeEngine

def peak():
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) * 1024

engine = OnnxRuntimeEngine(Path(sys.argv[1]), threads=1, options={MEMORY_REUSE: "0"})
step = engine.bind({name: engine.allocate(spec.shape, spec.dtype) for name, spec in
                    {**engine.inputs, **engine.outputs}.items()})
before = peak()
step.run()
print(peak() - before)
"""


def write_tower(path: Path) -> Path:
    """Three layers; each widens its input 2, 3, … 6 times in turn and takes the first part of that again."""
    nodes, last = [], "x"
    for layer in range(3):
        for times in range(2, WIDEST + 1):
            wide, narrow = f"wide.{layer}.{times}", f"narrow.{layer}.{times}"
            nodes.append(helper.make_node("Concat", [last] * times, [wide], axis=0))
            nodes.append(helper.make_node("Slice", [wide, "begin", "end"], [narrow]))
            last = narrow
    nodes.append(helper.make_node("Neg", [last], ["y"]))
    floats = SIZE // 4
    bounds = [helper.make_tensor(name, TensorProto.INT64, [1], [at]) for name, at in (("begin", 0), ("end", floats))]
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [floats]) for name in "xy")
    graph = helper.make_graph(nodes, "tower", [x], [y], bounds)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), path)
    return path


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the peak is read from /proc")
def test_a_tower_holds_no_more_than_its_widest_layer(tmp_path: Path) -> None:
    """All widths together are 20 times SIZE; the widest with what feeds it is 7 times, 15 as the arena grows."""
    path = write_tower(tmp_path / "tower.onnx")
    found = subprocess.run([sys.executable, "-c", GROWTH, path], check=True, capture_output=True, text=True)
    assert int(found.stdout) < 18 * SIZE


def test_a_tower_gives_the_same_numbers_as_any_engine(tmp_path: Path) -> None:
    values = np.random.default_rng(0).standard_normal(SIZE // 4).astype(np.float32)
    path = write_tower(tmp_path / "tower.onnx")
    for reuse in ("0", "1"):
        engine = OnnxRuntimeEngine(path, threads=1, options={MEMORY_REUSE: reuse})
        buffers = {"x": engine.allocate(values.shape, np.float32), "y": engine.allocate(values.shape, np.float32)}
        buffers["x"].array[...] = values
        engine.bind(buffers).run()
        np.testing.assert_array_equal(buffers["y"].array, -values)
