"""Two hosts: a small service on one (`pd doctor --serve`), a visit from the other (`pd doctor --peer HOST`)."""
