//! Fault points, at which a test can make this process fail. Empty unless built with `fault-points`.

#[cfg(not(feature = "fault-points"))]
mod points {
    /// Marks a fault point.
    #[inline(always)]
    pub(crate) fn fault_point(_point: &'static str, _seq: u64, _bytes: usize) {}
}

#[cfg(feature = "fault-points")]
mod points {
    use std::sync::OnceLock;

    /// The fault point that the runtime has reached.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub struct FaultPoint {
        /// Name of the fault point. While a group forms: `recorded`, `meeting`, `greeted`, `welcomed`,
        /// `proving`, `connected`. In a collective: `calling`, `sent`, `received`, `moved`. In a message:
        /// `message sent`, `message received`. On failure: `failing`, `told`. On teardown: `leaving`,
        /// `left`.
        pub point: &'static str,
        /// Number of the collective or message.
        pub seq: u64,
        /// Bytes of that collective or message transferred so far, to or from one peer.
        pub bytes: usize,
    }

    static HANDLER: OnceLock<fn(FaultPoint)> = OnceLock::new();

    /// Registers `handler`, which the thread that reaches a fault point calls. Only the first registration
    /// counts.
    pub fn on_fault_point(handler: fn(FaultPoint)) {
        let _ = HANDLER.set(handler);
    }

    pub(crate) fn fault_point(point: &'static str, seq: u64, bytes: usize) {
        if let Some(handler) = HANDLER.get() {
            handler(FaultPoint { point, seq, bytes });
        }
    }
}

pub(crate) use points::fault_point;
#[cfg(feature = "fault-points")]
pub use points::{FaultPoint, on_fault_point};
