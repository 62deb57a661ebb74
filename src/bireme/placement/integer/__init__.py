"""Placement as integer programs, solved by HiGHS."""
