"""Apply a model to many files. Files that have a result already are skipped."""

import argparse
from pathlib import Path

import numpy as np
from distributed import Client, as_completed, get_worker


def model():
    """Return the model, loaded once per worker; a real program reads its weights."""
    worker = get_worker()
    if not hasattr(worker, "model"):
        worker.model = np.linspace(0, 1, 512).reshape(8, 64)
    return worker.model


def apply_model(source: Path, target: Path) -> str:
    """Write the result for one file; a result that is there is complete."""
    scores = model() @ np.load(source)
    temporary = target.with_suffix(".part.npy")
    np.save(temporary, scores)
    temporary.rename(target)
    return source.name


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--input", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()

    options.output.mkdir(parents=True, exist_ok=True)
    sources = sorted(options.input.resolve().glob("*.npy"))
    targets = [options.output.resolve() / source.name for source in sources]
    pairs = [pair for pair in zip(sources, targets, strict=True) if not pair[1].exists()]
    print(f"{len(sources)} files, {len(sources) - len(pairs)} of them done before", flush=True)
    with Client() as client:
        # A task is repeated after an error of its own, and after the loss of its worker.
        futures = [client.submit(apply_model, *pair, retries=2, pure=False) for pair in pairs]
        failed = []
        for number, future in enumerate(as_completed(futures), start=1):
            if future.status == "error":
                failed.append(str(future.exception()))
            if number % max(1, len(pairs) // 10) == 0:
                print(f"{number}/{len(pairs)}", flush=True)
    for reason in failed:
        print(f"failed: {reason}")
    raise SystemExit(1 if failed else 0)


if __name__ == "__main__":
    main()
