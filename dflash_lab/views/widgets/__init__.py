"""Thin ipywidgets shells over pure views.

Each widget turns the values of its controls into a view of `dflash_lab.views` and shows
its HTML; nothing is computed here. Core ipywidgets only, so that JupyterLab, VS Code
and Colab show them. Where no widget can run, the view itself is shown.

Leaves out: views.
"""
