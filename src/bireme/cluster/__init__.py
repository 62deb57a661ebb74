"""Servers, devices and the links between them."""
