"""What `import torch` calls, by the entry point "torch.backends": makes the backend "convoke" known."""


def register() -> None:
    import torch.distributed

    if torch.distributed.is_available():
        # Registers itself, also where this is called in the middle of its import.
        from . import torch as _torch  # noqa: F401
