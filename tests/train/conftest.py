"""What tests of training share."""

from tests.support.graphs import remember_captures

remember_captures()
