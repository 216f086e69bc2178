"""Networks that enlarge images: ESRGAN and its relatives, through spandrel."""
