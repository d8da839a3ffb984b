"""Packages that only an extra of Lastgood brings, and what to say if one is missing."""

from __future__ import annotations

__all__ = ["EXTRAS", "why_missing"]

EXTRAS = {
    **dict.fromkeys(("prometheus_client", "rich", "typer"), "cli"),
    **dict.fromkeys(
        ("jinja2", "markupsafe", "matplotlib", "pandas", "PIL", "scipy", "sklearn", "snakemake"), "harness"
    ),
    **dict.fromkeys(("tokenizers", "torchvision", "transformers"), "harness"),
    "deepspeed": "deepspeed",
    **dict.fromkeys(("boto3", "botocore", "obstore"), "s3"),
    **dict.fromkeys(("nvidia_resiliency_ext", "torchsnapshot"), "third-party"),
    "pytest": "conformance",
}
"""The extra by the name under which a package is imported."""


def why_missing(error: ModuleNotFoundError, what: str) -> str | None:
    """What `what` needs and how to install it; None if it is no package of an extra that is missing."""
    extra = EXTRAS.get(error.name or "")
    return (
        None if extra is None else f"{what} needs {error.name}, which is not installed: pip install 'lastgood[{extra}]'"
    )
