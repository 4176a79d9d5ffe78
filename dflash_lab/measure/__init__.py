"""Figures that a sceptic believes: acceptance, time, and how sure they are.

`bench` runs the ways to decode of `methods` in turns and `bench_summary` tabulates;
`race` times, `acceptance`, `speedup`, `slices` and `intervals` make numbers of traces.

Leaves out: drawing them (`views/`).
"""
