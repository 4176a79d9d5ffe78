"""The lessons: written once, built into notebooks, exercises, pages and slides.

`lessons` builds and runs notebooks from their masters, `site` and `slides` make pages
of them, `checks/` tries what a reader wrote.

Leaves out: the lessons' text (`notebooks/masters/`).
"""
