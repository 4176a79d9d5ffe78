"""The lessons: written once, built into notebooks, exercises, pages and slides.

`masters` reads what is written by hand, `lessons` builds and runs notebooks from it,
`site` and `slides` make pages of them, `checks/` tries what a reader wrote.

Leaves out: the lessons' text (`notebooks/masters/`).
"""
