"""From documents to samples: one file per `pack_impl`."""
