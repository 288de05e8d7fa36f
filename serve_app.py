"""The import path of the Serve application: `serve run configs/serve.yaml`, or `serve_app:build` with your own args."""

from sgray.serve.build import build

__all__ = ["build"]
