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


def apply_model(source: Path, target: Path) -> None:
    """Write the result for one file; a result that is there is complete."""
    scores = model() @ np.load(source)
    temporary = target.with_suffix(".part.npy")
    np.save(temporary, scores)
    temporary.rename(target)


def show_progress(done: int, total: int) -> None:
    """Print a line for each twentieth: a bar that is drawn again and again fills a log file."""
    if done * 20 // total > (done - 1) * 20 // total:
        print(f"[{'#' * (done * 40 // total):<40}] {done}/{total} files", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--input", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()

    sources = sorted(options.input.resolve().glob("*.npy"))
    if not sources:
        raise SystemExit(f"there is no .npy file in {options.input.resolve()}")
    targets = [options.output.resolve() / source.name for source in sources]
    options.output.mkdir(parents=True, exist_ok=True)
    pairs = [pair for pair in zip(sources, targets, strict=True) if not pair[1].exists()]
    print(f"{len(sources)} files, {len(sources) - len(pairs)} of them done before", flush=True)
    failed = []
    with Client() as client:
        # A task is repeated after an error of its own, and after the loss of its worker.
        files = {client.submit(apply_model, *pair, retries=2, pure=False): pair for pair in pairs}
        for done, future in enumerate(as_completed(files), start=1):
            show_progress(done, len(files))
            if future.status == "error":
                failed.append(f"failed: {files[future][0].name}: {future.exception()}")
    if failed:
        raise SystemExit("\n".join(failed))


if __name__ == "__main__":
    main()
