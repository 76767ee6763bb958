//! Tests of the membership state machines: single scenarios, and many random ones in a simulated cluster.

mod agent;
mod coordinators;
mod faults;
mod invariants;
mod random;
mod scale;
mod scenarios;
mod simulation;
