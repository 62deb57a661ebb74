"""Reading a profile, by the name that scripts outside of the package import it by."""

from bireme.profile.profile import load_profile as load_profile
