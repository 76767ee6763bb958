#![doc = include_str!("../../README.md")]

#[doc = include_str!("../../docs/reference/joining.md")]
pub mod joining {}

#[doc = include_str!("../../docs/guides/first-job.md")]
pub mod first_job {}

#[doc = include_str!("../../docs/guides/coming-from.md")]
pub mod coming_from {}

#[doc = include_str!("../comm/README.md")]
pub mod comm {}

#[doc = include_str!("../env/README.md")]
pub mod env {}

#[doc = include_str!("../recorder/README.md")]
pub mod recorder {}

#[doc = include_str!("../store/README.md")]
pub mod store {}

#[doc = include_str!("../train/README.md")]
pub mod train {}
