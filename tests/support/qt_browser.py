"""A program: one empty page of QtWebEngine, which is Chromium as a Python package, on no screen. Takes its options."""

from __future__ import annotations

import os
import sys

from PyQt6.QtCore import QUrl
from PyQt6.QtWebEngineWidgets import QWebEngineView
from PyQt6.QtWidgets import QApplication


def main() -> int:
    os.environ |= {"QTWEBENGINE_CHROMIUM_FLAGS": " ".join(sys.argv[1:]), "QT_QPA_PLATFORM": "offscreen"}
    app = QApplication(sys.argv[:1])
    view = QWebEngineView()
    view.resize(1200, 900)
    view.load(QUrl("about:blank"))
    view.show()
    return app.exec()


if __name__ == "__main__":
    sys.exit(main())
