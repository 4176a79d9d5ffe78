"""From traces to numbers."""
