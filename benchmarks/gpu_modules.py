"""Which Python and JAX this is, and which modules are missing for which parts of `gpu.sh`.

python benchmarks/gpu_modules.py
"""

import importlib
import os
import platform
import sys

# By what they are for; names of packages where modules are called otherwise.
NEEDED = {
    "all parts": ["jax", "numpy", "optax"],
    "`multitower` on the command line": ["docstring_parser", "typeguard", "tyro", "rich"],
    "`multitower train` and `sample`": [
        "jinja2",
        "matplotlib",
        "orbax.checkpoint",
        "PIL",
        "sklearn",
        "tensorboardX",
    ],
    "the part torch": ["torch"],
    "the part keras": ["h5py", "namex", "optree", "rich", "keras"],
}
PACKAGES = {
    "docstring_parser": "docstring-parser",
    "orbax.checkpoint": "orbax-checkpoint",
    "PIL": "pillow",
    "sklearn": "scikit-learn",
}


def missing(modules: list[str]) -> list[str]:
    """The packages of those that cannot be imported."""
    found = []
    for module in modules:
        try:
            importlib.import_module(module)
        except ImportError:
            found.append(PACKAGES.get(module, module))
    return found


def main() -> None:
    """Prints what is there; the exit code is 1 if no part can run."""
    os.environ["KERAS_BACKEND"] = "jax"  # else Keras looks for TensorFlow
    found = {purpose: missing(modules) for purpose, modules in NEEDED.items()}
    for purpose, packages in found.items():
        print(f"{purpose}: {'missing: ' + ' '.join(packages) if packages else 'complete'}")
    if found["all parts"]:
        sys.exit(1)
    import jax

    print(f"Python {platform.python_version()} at {sys.executable}, JAX {jax.__version__}")


if __name__ == "__main__":
    main()
