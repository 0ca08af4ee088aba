"""Generate without a server: `sglang.Engine` with this package's cache.

dsv4-sglang make-tiny /tmp/tiny
python examples/offline_generate.py /tmp/tiny
"""

from __future__ import annotations

import argparse

from dsv4_sglang.srt.launch.command import engine_arguments, has_gpu, prepare_this_process


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model_path", help="model folder")
    parser.add_argument("--max-tokens", type=int, default=32)
    options = parser.parse_args()

    # SGLang reads its environment at import, so this comes first. With a GPU it changes nothing.
    cpu = not has_gpu()
    prepare_this_process(cpu)
    import sglang

    prompts = ["The capital of France is", "A window of 128 tokens", "Every fourth token"]
    with sglang.Engine(**engine_arguments(options.model_path, cpu)) as engine:
        sampling = {"temperature": 0, "max_new_tokens": options.max_tokens}
        for prompt, answer in zip(prompts, engine.generate(prompts, sampling)):
            print(f"{prompt!r} -> {answer['text']!r}")


# SGLang spawns its processes, and each imports this file again.
if __name__ == "__main__":
    main()
