"""`python -m stratagem.worker`: one worker process."""

from stratagem.common.malloc import tune_malloc

# Before anything large is allocated, and so before torch is imported.
_MALLOC = tune_malloc()

if __name__ == "__main__":
    import sys

    from stratagem.worker.main import main

    sys.exit(main(sys.argv[1:], _MALLOC))
