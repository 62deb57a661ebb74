"""What tests of training share."""

from itertools import count

from bireme.train import prepare as capturing
from tests.support.graphs import remember_captures

remember_captures()
capturing._earlier = count(1)  # no copy captures what this process remembers
