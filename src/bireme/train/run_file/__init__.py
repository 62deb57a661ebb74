"""`run.toml`: what `bireme train` is to do, as a file that people write."""

from bireme.train.run_file.defaults import with_model_defaults as with_model_defaults
from bireme.train.run_file.planning import Memory as Memory
from bireme.train.run_file.run import RunFile as RunFile
from bireme.train.run_file.run import load_run_file as load_run_file
from bireme.train.run_file.run import paths_for_all as paths_for_all
from bireme.train.run_file.run import settings_within as settings_within
from bireme.train.run_file.run import with_absolute_paths as with_absolute_paths
from bireme.train.run_file.run import with_paths_of_machine as with_paths_of_machine
from bireme.train.run_file.run import with_paths_within as with_paths_within
from bireme.train.run_file.tables import Log as Log
from bireme.train.run_file.tables import Training as Training
from bireme.train.run_file.text import commented_toml as commented_toml
from bireme.train.run_file.text import reference_markdown as reference_markdown
from bireme.train.run_file.text import to_toml as to_toml
