"""Every symptom, see `phalanx.tools.doctor.symptoms`."""

from __future__ import annotations

from phalanx.tools.doctor.symptoms_of_builds import BUILDS, COMPANIONS, LIBRARIES
from phalanx.tools.doctor.symptoms_of_machines import CONTAINERS, DRIVER, GPUS, LIMITS, VARIABLES
from phalanx.tools.doctor.symptoms_told import SUBJECTS

SYMPTOMS = (
    *DRIVER,
    *CONTAINERS,
    *BUILDS,
    *COMPANIONS,
    *LIBRARIES,
    *GPUS,
    *LIMITS,
    *VARIABLES,
    *SUBJECTS,
)
