"""Make PyPI's torchvision importable with a CPU build of torch.

PyPI has only the CUDA build. Its compiled library does not load without CUDA, so the operators `torchvision::nms` and
`torchvision::qnms` do not exist, and the fake implementation that torchvision registers for nms at import time raises
"operator torchvision::nms does not exist". SGLang imports torchvision through transformers but calls no operator of it,
so it is enough to declare the two schemas if the library is missing. A second run changes nothing.
"""

import importlib.util
from pathlib import Path

MARK = "# schemas declared by dsv4_sglang tools/patch_torchvision_cpu.py"
DECLARATIONS = f"""

{MARK}
if not _has_ops():
    _schemas = torch.library.Library("torchvision", "FRAGMENT")
    for _name in ("nms", "qnms"):
        _schemas.define(f"{{_name}}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
"""


def main() -> None:
    spec = importlib.util.find_spec("torchvision")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("torchvision is not installed in this environment: run tools/setup.sh")
    # extension.py is imported before the module that registers the fake implementations.
    extension = Path(spec.submodule_search_locations[0]) / "extension.py"
    text = extension.read_text()
    if MARK not in text:
        extension.write_text(text + DECLARATIONS)


if __name__ == "__main__":
    main()
