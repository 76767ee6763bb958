//! Frameworks for Rust on several ranks: their gradients averaged by [`convoke_train::Ddp`].
//!
//! One feature for each framework, none by default: `candle`, `burn`. Both compute all gradients in one call, so what is
//! sent while the pass goes on is only what they have handed over; buckets are sent side by side nevertheless.
#![warn(missing_docs)]

#[cfg(feature = "burn")]
pub mod burn;
#[cfg(feature = "candle")]
pub mod candle;
