//! Frameworks for Rust on several ranks: their gradients averaged by [`convoke_train::Ddp`].
//!
//! One feature for each framework, none by default: `candle`, `burn`. Both compute all gradients in one call, so buckets
//! are sent while the next ones are filled, but not while gradients are computed.
#![warn(missing_docs)]

#[cfg(feature = "burn")]
pub mod burn;
#[cfg(feature = "candle")]
pub mod candle;
