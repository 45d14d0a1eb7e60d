"""The record: raw lines, the figures computed from them, and the page that shows the figures."""
