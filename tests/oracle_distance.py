"""Measure the distance of servers to the oracle: transformers in fp32 on the same model weights, teacher-forced.

    python tests/oracle_distance.py [--seeds 0,1] [--servers in-tree,fp8,bf16] [--out DIR]

Every seed makes a `make-tiny` model, which three servers load: SGLang's own, ours with FP8 entries and ours with
bfloat16 entries, all with CUDA graphs and bf16 compute. Prompts of random tokens are sent one at a time and decoded
greedily. For each token this compares the server's log p of the token that it chose with the oracle's, and
notes if the oracle would have chosen the same token. Rows of path "prefill" compare the same tokens sent as part of the
prompt. The first server starts alone and compiles kernels; the others start together.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import command_line, report
from benchmarks.servers import Server, command, random_prompt

LENGTHS = (1, 3, 4, 5, 127, 128, 129, 300, 700)
# More than 512 CSA entries, so that the indexer has to select.
LONG = 2600
GENERATED = 40
# Name: (ours, flags). The in-tree server keeps its prefix cache, as by default; it is flushed before each prompt.
SERVERS: dict[str, tuple[bool, tuple[str, ...]]] = {
    "in-tree": (False, ()),
    "fp8": (True, ("--disable-radix-cache",)),
    "bf16": (True, ("--disable-radix-cache", "--kv-cache-dtype", "bfloat16")),
}
FLAGS = (
    *("--mem-fraction-static", "0.3", "--max-total-tokens", "262144", "--max-running-requests", "16"),
    *("--cuda-graph-max-bs-decode", "8", "--dtype", "bfloat16", "--context-length", "8192"),
)
CPU_FLAGS = ("--max-running-requests", "4", "--context-length", "8192", "--dtype", "bfloat16")
# Largest difference of log p, by the oracle, between its choice and the server's that counts as a near tie.
NEAR_TIE = 0.05


def prompts(vocab: int, seed: int, lengths: tuple[int, ...]) -> dict[int, list[int]]:
    return {length: random_prompt(length, vocab, 1000 * seed + length) for length in lengths}


def ask(server: Server, prompt: list[int], tokens: int) -> dict[str, Any]:
    """Return greedily decoded tokens and their logprobs, and the logprobs of the same tokens sent as a prompt.

    Args:
        server: running server.
        prompt: token ids.
        tokens: number of tokens to generate.
    """
    server.flush()
    answer = server.generate(prompt, tokens, return_logprob=True)
    pairs = answer["meta_info"]["output_token_logprobs"]
    generated = [int(pair[1]) for pair in pairs]
    server.flush()
    forced = server.generate([*prompt, *generated], 1, return_logprob=True, logprob_start_len=0)
    inputs = forced["meta_info"]["input_token_logprobs"][-len(generated) :]
    if [int(pair[1]) for pair in inputs] != generated:
        raise ValueError(f"input_token_logprobs do not end with the tokens that were sent: {inputs[:3]}")
    return {
        "prompt": prompt,
        "tokens": generated,
        "decode": [float(pair[0]) for pair in pairs],
        "prefill": [float(pair[0]) for pair in inputs],
    }


def distances(answer: dict[str, Any], score: Any, path: str) -> dict[str, Any]:
    """Return statistics of the differences between the server's and the oracle's log p.

    Args:
        answer: result of `ask`.
        score: the oracle's `Score` of the answer's tokens.
        path: "decode" or "prefill", which of the answer's logprobs to compare.
    """
    apart = [abs(a - b) for a, b in zip(answer[path], score.logprobs.tolist())]
    margins = score.margin.tolist()
    return {
        "mean": statistics.fmean(apart),
        "max": max(apart),
        "values": [round(value, 5) for value in apart],
        "agree": sum(margin == 0 for margin in margins) / len(margins),
        "agree or near tie": sum(margin <= NEAR_TIE for margin in margins) / len(margins),
        "largest margin": max(margins),
    }


class Bench:
    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.cpu = args.dry_run or args.rescore is not None
        self.folder = report.scratch_folder("oracle_distance")
        self.names = [name for name in args.servers.split(",") if name]
        self.seeds = [int(seed) for seed in args.seeds.split(",")]
        self.lengths: tuple[int, ...] = (*LENGTHS, LONG)
        self.tokens = GENERATED
        if args.dry_run:
            self.names, self.seeds, self.lengths, self.tokens = ["fp8"], self.seeds[:1], (1, 5, 129), 4
        elif args.quick:
            self.seeds = self.seeds[:1]
        self.answers: dict[tuple[str, int], dict[int, dict[str, Any]]] = {}

    def checkpoint(self, seed: int) -> Path:
        from dsv4_sglang.testing.tiny import make_tiny
        from dsv4_sglang.testing.tiny_config import TinySpec

        folder = self.folder / f"seed{seed}"
        if not (folder / "config.json").is_file():
            make_tiny(folder, TinySpec(seed=seed, ratios=(0, 4, 128) if self.args.dry_run else TinySpec.ratios))
        return folder

    def server(self, name: str, seed: int) -> Server:
        ours, flags = SERVERS[name]
        common = CPU_FLAGS if self.cpu else FLAGS
        argv, environment = command(self.checkpoint(seed), [*common, *flags], ours, self.cpu)
        # Wrong answers at these widths (`srt.plugin.activate`), which `command` accepts for the sake of speed.
        environment |= {"SGLANG_OPT_FUSE_MHC_POST_PRE": "0"}
        log = Path(self.args.out) / "logs" / f"oracle_distance-{name}-{seed}.log"
        return Server(f"{name}, seed {seed}", argv, environment, log)

    def serve(self, group: list[tuple[str, int]], result: report.Report) -> Iterator[dict[str, Any]]:
        """Start the servers of the group together, send all prompts to each, stop them; keep answers for `score`."""
        from dsv4_sglang.testing.tiny_config import TinySpec

        servers = {key: self.server(*key) for key in group}
        problems = []
        try:
            for server in servers.values():
                server.launch()
            for key, server in servers.items():
                try:
                    server.wait(self.args.start_timeout)
                    yield {"kind": "start", "server": key[0], "seed": key[1], "start s": server.start_seconds}
                    began = time.monotonic()
                    self.answers[key] = {
                        length: ask(server, prompt, self.tokens)
                        for length, prompt in prompts(TinySpec.vocab, key[1], self.lengths).items()
                    }
                    kept = {f"{name}/{seed}": answers for (name, seed), answers in self.answers.items()}
                    result.fact("answers", kept)
                    print(f"{server.name}: answered in {time.monotonic() - began:.1f} s", flush=True)
                except Exception as error:
                    problems.append(f"{server.name}: {type(error).__name__}: {error}")
                finally:
                    server.stop()
        finally:
            for server in servers.values():
                server.stop()
        if problems:
            raise RuntimeError("; ".join(problems))

    def score(self, seed: int) -> Iterator[dict[str, Any]]:
        """Score the tokens of every server of this seed with the oracle."""
        import torch
        from reference.oracle import Oracle

        torch.backends.cuda.matmul.allow_tf32 = False
        torch.backends.cudnn.allow_tf32 = False
        oracle = Oracle(self.checkpoint(seed), device="cpu" if self.cpu else "cuda")
        for (name, of_seed), answers in self.answers.items():
            if of_seed != seed:
                continue
            for length, answer in answers.items():
                score = oracle.score(answer["prompt"], answer["tokens"])
                for path in ("decode", "prefill"):
                    row = {"kind": "prompt", "server": name, "seed": seed, "prompt": length, "path": path}
                    yield row | distances(answer, score, path)
            if name != self.names[0]:
                continue
            # Effect of rounding the KV entries alone on the oracle, for the first server's tokens: the expected noise.
            for rows in ("bf16", "fp8"):
                for length, answer in answers.items():
                    exact = oracle.score(answer["prompt"], answer["tokens"])
                    rounded = oracle.score(answer["prompt"], answer["tokens"], rows=rows)
                    same = {**answer, "decode": rounded.logprobs.tolist()}
                    row = {"kind": "rounding", "server": f"oracle, {rows} rows", "seed": seed, "prompt": length}
                    yield row | {"path": "decode"} | distances(same, exact, "decode")


def summary(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return one table row per server, path and set of prompts, over all seeds and tokens."""
    groups: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for row in rows:
        if row.get("kind") in ("prompt", "rounding"):
            which = "long" if row["prompt"] > max(LENGTHS) else "1 to 700"
            groups.setdefault((row["server"], row["path"], which), []).append(row)
    lines = []
    for (server, path, which), members in groups.items():
        values = [value for row in members for value in row["values"]]
        lines.append(
            {
                "server": server,
                "path": path,
                "prompts": which,
                "tokens": len(values),
                "mean": statistics.fmean(values),
                "max": max(values),
                "agree": statistics.fmean(row["agree"] for row in members),
                "agree or near tie": statistics.fmean(row["agree or near tie"] for row in members),
                "seeds": len({row["seed"] for row in members}),
            }
        )
    return lines


def saved_answers(file: Path) -> dict[tuple[str, int], dict[int, dict[str, Any]]]:
    """Return the answers of an earlier run's servers, by server and seed, then by prompt length."""
    answers = {}
    for key, by_length in json.loads(file.read_text())["facts"]["answers"].items():
        name, seed = key.rsplit("/", 1)
        answers[name, int(seed)] = {int(length): answer for length, answer in by_length.items()}
    return answers


def main(argv: list[str] | None = None) -> int:
    options = command_line.report_parser(__doc__)
    options.add_argument("--seeds", default="0,1", help="seeds of the models, separated by commas (%(default)s)")
    options.add_argument("--servers", default=",".join(SERVERS), help="some of %(default)s")
    options.add_argument("--start-timeout", type=float, default=300, help="seconds a server may take to start")
    options.add_argument("--rescore", type=Path, help="JSON file of a run: start no server, score its answers again")
    args = options.parse_args(argv)
    bench = Bench(args)
    settings = {"flags": list(FLAGS), "lengths": bench.lengths, "generated": bench.tokens, "seeds": bench.seeds}
    result = report.Report("oracle_distance", args, settings)
    keys = [(name, seed) for seed in bench.seeds for name in bench.names]
    if args.rescore:
        bench.answers, keys = saved_answers(args.rescore), []
    for group in (keys[:1], keys[1:]):
        if group:
            label = "+".join(f"{name}-{seed}" for name, seed in group)
            result.part(f"serve/{label}", partial(bench.serve, group, result))
    for seed in bench.seeds:
        result.part(f"score/{seed}", partial(bench.score, seed))
    lines = summary(result.rows)
    columns = ["server", "path", "prompts", "seeds", "tokens", "mean", "max", "agree", "agree or near tie"]
    result.table("|d logprob| to transformers in fp32, greedy", columns, lines)
    result.fact("summary", lines)
    return result.close()


if __name__ == "__main__":
    raise SystemExit(main())
